"""Varints of protobuf: numbers in groups of seven bits, the lowest first."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_LENGTH = 5
"""Bytes of the longest varint that is the length of a field."""

_LONGEST = 10


def read_varint(data: Sequence[int], position: int, most: int = _LONGEST) -> tuple[int, int]:
    """Reads a varint of at most `most` bytes; returns it, and its end. Raises IndexError."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift >= 7 * most:
            raise IndexError(position)


def encode_varint(value: int) -> bytes:
    """Encodes a number that is not negative."""
    if value < 128:
        return SINGLE_BYTES[value]
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


SINGLE_BYTES = tuple(bytes((value,)) for value in range(128))
"""The varints of one byte."""

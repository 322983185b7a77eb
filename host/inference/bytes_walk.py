"""Checks that the elements of a BYTES tensor lie within its buffer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import repeat

import numpy as np

from host.inference.request import Buffer
from host.inference.shared_memory_bytes import CHUNK_SIZE, SharedMemoryBytes

_LENGTH = struct.Struct("<I")
_NUMPY_THRESHOLD = 64  # elements; a loop is faster than numpy for fewer
_SHORT = 256  # bytes; shorter elements are found all at once


class InvalidBytesTensor(Exception):
    """The elements do not fill the buffer; `text` adds the tensor and the model."""

    def text(self, tensor: str, model: str) -> str:
        """The message for the client.

        Source: docs/reference/protocol.md, "The request against the model", rule 12.
        """
        template: str = self.args[0]
        return template.format(f"inference input '{tensor}' for model '{model}'", tensor=tensor)


def check_elements(data: Buffer | SharedMemoryBytes, count: int) -> None:
    """Checks that `data` (contiguous) holds `count` elements, each a length and as many bytes.

    Reads nothing outside of the buffer. The time depends on its size, not on `count`; at most one
    chunk is copied. Raises InvalidBytesTensor, and HostError INTERNAL if shared memory of the
    client is gone.
    """
    if isinstance(data, SharedMemoryBytes):
        check_elements_in_chunks(data.read_part, len(data), count, CHUNK_SIZE)
        return
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if count >= _NUMPY_THRESHOLD and count * 4 <= size:
        if _is_uniform(data, size, count) or _are_short(data, size, count):
            return
    if not _lengths_chain(data, size, count):
        whole = data
        # Raises the precise error.
        check_elements_in_chunks(lambda begin, length: whole, size, count, size)


def _is_uniform(data: Buffer, size: int, count: int) -> bool:
    """Whether all elements have the same length, found without a loop."""
    stride, rest = divmod(size, count)
    if rest or _LENGTH.unpack_from(data)[0] != stride - 4:
        return False
    lengths = np.ndarray((count,), "<u4", data, 0, (stride,))
    return bool((lengths == stride - 4).all())


def _are_short(data: Buffer, size: int, count: int) -> bool:
    """Whether the elements are short texts. True is certain, False is not.

    A length may stand wherever four bytes are a number below 256, and three zero bytes are rare in
    text. If each such place is the end of the element before, these are the elements.
    """
    if size > count * (_SHORT + 4):
        return False
    words = np.ndarray((size - 3,), "<u4", data, 0, (1,))
    places = np.flatnonzero(words < _SHORT)
    if len(places) != count or places[0] != 0:
        return False
    ends = places + 4 + words[places]
    return bool(ends[-1] == size and (ends[:-1] == places[1:]).all())


def _lengths_chain(data: Buffer, size: int, count: int) -> bool:
    """Whether following `count` lengths leads exactly to the end of the buffer."""
    unpack = _LENGTH.unpack_from
    position = 0
    try:
        for _ in repeat(None, count):
            position += unpack(data, position)[0] + 4
    except struct.error:  # a length lies outside of the buffer
        return False
    return position == size


def check_elements_in_chunks(
    part: Callable[[int, int], Buffer], size: int, count: int, most: int
) -> None:
    """Checks `size` bytes in chunks: `part(begin, length)` returns up to `most` bytes, at least 4.

    Raises InvalidBytesTensor.
    """
    position = found = 0
    while size - position >= 4:
        end = min(most, size - position)
        piece = part(position, end)
        place = 0
        many = _uniform_run(piece, end)
        if many >= _NUMPY_THRESHOLD and found + many <= count:
            place = many * (_LENGTH.unpack_from(piece)[0] + 4)
            found += many
        while end - place >= 4:
            if found == count:
                raise InvalidBytesTensor(
                    f"unexpected number of string elements {found + 1} for {{}}, expecting {count}"
                )
            (length,) = _LENGTH.unpack_from(piece, place)
            place += 4
            left = size - position - place
            if length > left:
                if found + 1 < count:
                    raise InvalidBytesTensor(
                        f"expected {count} string elements for {{}}, got {found + 1}"
                    )
                raise InvalidBytesTensor(
                    "incomplete string data for inference input '{tensor}', expecting string of"
                    f" length {length} but only {left} bytes available"
                )
            place += length
            found += 1
        position += place
    if position < size:
        raise InvalidBytesTensor(
            "incomplete string length indicator for {}, expecting 4 bytes but only"
            f" {size - position} bytes available."
            " Please make sure the string length indicator is in one buffer."
        )
    if found != count:
        raise InvalidBytesTensor(f"expected {count} string elements for {{}}, got {found}")


def _uniform_run(piece: Buffer, size: int) -> int:
    """The number of elements of equal length in a chunk, if it holds nothing else; otherwise 0."""
    length = _LENGTH.unpack_from(piece)[0]
    many: int = size // (length + 4)
    lengths = np.ndarray((many,), "<u4", piece, 0, (length + 4,))
    return many if (lengths == length).all() else 0

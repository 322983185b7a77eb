"""Walks the elements of a BYTES tensor, to know that they lie within its buffer."""

from __future__ import annotations

import struct
from itertools import repeat

import numpy as np

from host.inference import Buffer

_LENGTH = struct.Struct("<I")
_WORTH_NUMPY = 64  # elements: below that the loop is done before numpy has begun
_SHORT = 256  # bytes: elements below that are found all at once


class BytesFault(Exception):
    """What is wrong with the content; the subject of the sentence is filled in by `text`."""

    def text(self, tensor: str, model: str) -> str:
        """The message (protocol spec 3.3, rule 13)."""
        template: str = self.args[0]
        return template.format(f"inference input '{tensor}' for model '{model}'")


def walk(data: Buffer, count: int) -> None:
    """Check that `data` (contiguous) is `count` elements, each a length and as many bytes.

    Raises BytesFault. Reads nothing outside the buffer, and takes time by its size, whatever
    `count` is.
    """
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if count >= _WORTH_NUMPY and count * 4 <= size:
        if _is_uniform(data, size, count) or _are_short(data, size, count):
            return
    if not _chains(data, size, count):
        _find_fault(data, size, count)


def _is_uniform(data: Buffer, size: int, count: int) -> bool:
    """Whether these are elements of one length, which is seen without a walk."""
    stride, rest = divmod(size, count)
    if rest or _LENGTH.unpack_from(data)[0] != stride - 4:
        return False
    lengths = np.ndarray((count,), "<u4", data, 0, (stride,))
    return bool((lengths == stride - 4).all())


def _are_short(data: Buffer, size: int, count: int) -> bool:
    """Whether these are short texts; True is certain, False is not.

    Where four bytes, at whatever place, are a number below 256, a length may stand: three zero
    bytes are rare in text. If every such place is where the element before it ends, then these
    are the elements.
    """
    if size > count * (_SHORT + 4):
        return False
    words = np.ndarray((size - 3,), "<u4", data, 0, (1,))
    places = np.flatnonzero(words < _SHORT)
    if len(places) != count or places[0] != 0:
        return False
    ends = places + 4 + words[places]
    return bool(ends[-1] == size and (ends[:-1] == places[1:]).all())


def _chains(data: Buffer, size: int, count: int) -> bool:
    """Whether going from length to length `count` times leads exactly to the end."""
    unpack = _LENGTH.unpack_from
    position = 0
    try:
        for _ in repeat(None, count):
            position += unpack(data, position)[0] + 4
    except struct.error:  # a length does not lie within the buffer
        return False
    return position == size


def _find_fault(data: Buffer, size: int, count: int) -> None:
    """Walk again, slowly, and raise what is wrong."""
    position = found = 0
    while size - position >= 4:
        if found == count:
            raise BytesFault(
                f"unexpected number of string elements {found + 1} for {{}}, expecting {count}"
            )
        (length,) = _LENGTH.unpack_from(data, position)
        position += 4
        if length > size - position:
            raise BytesFault(
                f"incomplete string element {found} for {{}},"
                f" expecting {length} bytes but only {size - position} bytes available."
            )
        position += length
        found += 1
    if position < size:
        raise BytesFault(
            "incomplete string length indicator for {}, expecting 4 bytes but only"
            f" {size - position} bytes available."
            " Please make sure the string length indicator is in one buffer."
        )
    raise BytesFault(f"expected {count} string elements for {{}}, got {found}")

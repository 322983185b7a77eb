"""Cuts the large `data` arrays out of a JSON text, and decodes them in pieces.

A JSON decoder makes one object for each element, and holds the interpreter for the whole text:
64 MiB of numbers took 347 MiB and 1.6 s. A piece takes about a millisecond.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from host.errors import HostError
from host.frontends.http.json_reader import read

MIN_CUT_BYTES = 65536
"""Bytes of an array that is cut out."""

MAX_NESTING = 100
"""The maximum nesting depth of an array that is cut out."""

PIECE_BYTES = 32768
"""Bytes that are decoded at once, in about a millisecond."""

_MAX_GAP = 65536  # bytes of brackets and white space, or of a number, in an array that is cut out
_SEARCH_STEP = 1 << 18  # bytes; a search holds the interpreter for up to 2 ms
_PAUSE = 1e-5  # seconds between two pieces, in which the event loop gets the interpreter


def _compile(pattern: bytes) -> re.Pattern[bytes]:
    """Compiles a pattern whose quantifiers are possessive, which saves the memory of backtracking.

    Python 3.10 does not have them; greedy ones match the same here.
    """
    if sys.version_info < (3, 11):
        pattern = pattern.replace(b"*+", b"*").replace(b"++", b"+")
    return re.compile(pattern, re.DOTALL)


_NAME = b'"data"'
_OPENING = _compile(rb'"data"[ \t\n\r]*+:[ \t\n\r]*+(?=\[)')
_FIRST_ELEMENT = _compile(rb"[\[ \t\n\r]*+")
_NOT_IN_NUMBERS = _compile(rb'["{}]')
_STRING = _compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_STRINGS = _compile(rb'(?:[\[\], \t\n\r]*+"[^"\\]*+(?:\\.[^"\\]*+)*+")++')
_CLOSINGS = _compile(rb"[\] \t\n\r]*+")
_WHITESPACE = b" \t\n\r"
_BRACKETS_OR_STRINGS = _compile(rb'[\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_QUOTE = 34
_TO_SPACES = bytes.maketrans(b"[]", b"  ")
_POSITION = re.compile(r"(?<= at )[0-9]+$")

# Kinds of bytes in an array: a part of an element, brackets, a comma.
_ELEMENT, _OPEN, _CLOSE, _COMMA = range(4)
_KINDS = np.zeros(256, np.uint8)
_KINDS[list(b"[],")] = _OPEN, _CLOSE, _COMMA
_STEPS = np.array([0, 1, -1, 0], np.int32)  # of the nesting depth, by kind
_MISPLACED = np.zeros(16, np.bool_)  # by 4 times the kind of a byte plus that of the next one
for _first, _second in (
    (_ELEMENT, _OPEN),
    (_OPEN, _CLOSE),
    (_OPEN, _COMMA),
    (_CLOSE, _ELEMENT),
    (_CLOSE, _OPEN),
    (_COMMA, _CLOSE),
    (_COMMA, _COMMA),
):
    _MISPLACED[4 * _first + _second] = True

_decode = msgspec.json.Decoder(list[Any]).decode


class LargeArray:
    """An array of numbers or of strings, nested or not, whose brackets and commas are valid.

    `pieces` has the position of each piece of the text, which holds whole elements.
    """

    def __init__(self, text: bytes, pieces: list[tuple[int, int]], of_strings: bool) -> None:
        self.start = pieces[0][0]
        self.end = pieces[-1][1]
        self.was_read = False
        self._text = text
        self._pieces = pieces
        self._of_strings = of_strings

    def __iter__(self) -> Iterator[list[Any]]:
        """Decodes the elements, without the nesting, in pieces.

        Raises HostError INTERNAL for a syntax error.
        """
        self.was_read = True
        for start, end in self._pieces:
            elements = self._decode(self._text[start:end], start)
            if elements:
                yield elements
                time.sleep(_PAUSE)

    def _decode(self, piece: bytes, start: int) -> list[Any]:
        """Decodes a piece at position `start`; the last one may be closing brackets only."""
        if not self._of_strings:
            piece = piece.translate(_TO_SPACES)
        elif b"[" in piece or b"]" in piece:
            try:
                return _decode(b"[%b]" % b",".join(_STRING.findall(piece)))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                piece = _BRACKETS_OR_STRINGS.sub(_blank_brackets, piece)  # for the position
        return _decode_piece(piece, start) if piece.strip(_WHITESPACE) else []


class CutText:
    """A JSON text with placeholders instead of its large arrays.

    Args:
        text: The whole text.
        max_arrays: The number of `data` arrays of any size after which no more are cut out.
        min_bytes: Bytes of an array that is cut out.
        piece_bytes: The minimum size of the pieces; each ends with a whole element.
    """

    def __init__(
        self,
        text: bytes,
        max_arrays: int,
        min_bytes: int = MIN_CUT_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._arrays: dict[str, LargeArray] = {}
        self._removed: list[tuple[int, int]] = []  # end in `rest`, and bytes removed up to there
        parts: list[bytes] = []
        position = size = 0
        for array in _find_arrays(text, max_arrays, min_bytes, piece_bytes):
            key = secrets.token_hex(16)  # a client cannot write a placeholder itself
            self._arrays[key] = array
            parts += (text[position : array.start], b'{"%b":0}' % key.encode())
            size += len(parts[-2]) + len(parts[-1])
            position = array.end
            self._removed.append((size, position - size))
        self.rest = b"".join((*parts, text[position:])) if parts else text

    def array(self, value: Any) -> LargeArray | None:
        """Returns the array whose placeholder was decoded as `value`; None for another value."""
        if not self._arrays or type(value) is not dict or len(value) != 1:
            return None
        return self._arrays.get(next(iter(value)))

    def check_unread_arrays(self) -> None:
        """Raises HostError INTERNAL if an array that was not decoded has a syntax error."""
        for array in self._arrays.values():
            if not array.was_read:
                for _ in array:
                    pass

    def original_error(self, error: HostError) -> HostError:
        """Returns the first syntax error of the whole text, for one in `rest`."""
        found = _POSITION.search(error.message)
        if found is None:
            return error
        position, moved = int(found.group()), error
        for (end, removed), array in zip(self._removed, self._arrays.values(), strict=True):
            if end > position:
                break
            moved = _moved(error, removed)
            try:
                for _ in array:
                    pass
            except HostError as earlier:
                return earlier
        return moved


def _blank_brackets(found: re.Match[bytes]) -> bytes:
    """Returns a string as it is, and spaces for brackets, so that positions stay."""
    return found[0] if found[0][0] == _QUOTE else b" " * len(found[0])


def _find_arrays(
    text: bytes, max_arrays: int, min_bytes: int, piece_bytes: int
) -> Iterator[LargeArray]:
    position, end = 0, len(text)
    while position < end and max_arrays:
        stop = min(position + _SEARCH_STEP, end)
        found = text.find(_NAME, position, stop)
        if found < 0:
            position = stop if stop == end else stop - len(_NAME) + 1
            time.sleep(_PAUSE)
            continue
        position = found + len(_NAME)
        opening = _OPENING.match(text, found)
        # After a backslash, this is not a name but part of a string.
        if opening is None or text[found - 1 : found] == b"\\":
            continue
        max_arrays -= 1
        array = _array_at(text, opening.end(), piece_bytes)
        if array is not None:
            position = array.end
            if array.end - array.start >= min_bytes:
                yield array


def _array_at(text: bytes, start: int, piece_bytes: int) -> LargeArray | None:
    """Returns the array that starts here; None if it has other elements or misplaced brackets."""
    first = _FIRST_ELEMENT.match(text, start, start + _MAX_GAP)
    assert first is not None
    of_strings = text[first.end() : first.end() + 1] == b'"'
    pieces: list[tuple[int, int]] = []
    depth = 0
    runs = _string_runs if of_strings else _number_runs
    for begin, end in runs(text, start, piece_bytes):
        piece = text[begin:end]
        if of_strings or b"[" in piece or b"]" in piece:
            structure = piece.translate(None, _WHITESPACE)
            if of_strings:
                structure = _STRING.sub(b"s", piece).translate(None, _WHITESPACE)
            before = b"" if not pieces else b"s" if of_strings else b","
            after = b"" if of_strings else b","
            depths = _nesting(before + structure + after, depth, of_strings)
            if depths is None:
                return None
            if not depths[-1]:
                pieces.append((begin, begin + _closing_place(piece, depth, of_strings) + 1))
                return LargeArray(text, pieces, of_strings)
            depth = int(depths[-1])
        elif piece.lstrip(_WHITESPACE)[:1] in (b"", b","):
            return None  # no number between two commas
        pieces.append((begin, end))
        time.sleep(_PAUSE)
    return None


def _nesting(structure: bytes, depth: int, of_strings: bool) -> npt.NDArray[np.int32] | None:
    """Returns the depth after each byte, up to the end of the array; None if it is not valid."""
    kinds = _KINDS[np.frombuffer(structure, np.uint8)]
    depths: npt.NDArray[np.int32] = np.cumsum(_STEPS[kinds], dtype=np.int32) + np.int32(depth)
    ends = np.flatnonzero((depths == 0) & (kinds == _CLOSE))
    if len(ends):
        kinds, depths = kinds[: ends[0] + 1], depths[: ends[0] + 1]
    if depths.max(initial=0) > MAX_NESTING:
        return None
    pairs = 4 * kinds[:-1] + kinds[1:]
    if _MISPLACED[pairs].any() or (of_strings and not pairs.all()):  # pair 0: two strings
        return None
    return depths


def _closing_place(piece: bytes, depth: int, of_strings: bool) -> int:
    """Returns the place of the bracket that ends the array."""
    if of_strings:
        piece = _STRING.sub(lambda found: b"s" * len(found.group()), piece)
    kinds = _KINDS[np.frombuffer(piece, np.uint8)]
    depths = np.cumsum(_STEPS[kinds], dtype=np.int32) + depth
    return int(np.flatnonzero((depths == 0) & (kinds == _CLOSE))[0])


def _number_runs(text: bytes, start: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields pieces of whole elements, up to the first byte that is in no array of numbers."""
    end = len(text)
    while start < end:
        least = min(start + piece_bytes, end)
        most = min(least + _MAX_GAP, end)
        comma = text.find(b",", least, most)
        stop = most if comma < 0 else comma
        other = _NOT_IN_NUMBERS.search(text, start, stop)
        if other is not None:
            yield start, other.start()
            return
        if comma < 0 and most < end:
            return  # no number is that long
        yield start, stop
        start = stop + 1


def _string_runs(text: bytes, start: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields pieces that end with a whole string, and at last one of closing brackets."""
    size = piece_bytes
    while True:
        found = _STRINGS.match(text, start, start + size)
        if found is not None:
            yield found.span()
            start, size = found.end(), piece_bytes
        elif start + size < len(text):
            size *= 2  # the next string may be longer than a piece
        else:
            closings = _CLOSINGS.match(text, start, start + _MAX_GAP)
            assert closings is not None
            yield closings.span()
            return


def _decode_piece(piece: bytes, start: int) -> list[Any]:
    """Decodes elements at position `start` of the text. Raises HostError INTERNAL."""
    elements = piece.lstrip(b", \t\n\r")
    start += len(piece) - len(elements)
    text = b"[%b]" % elements
    try:
        return _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        found: list[Any] = read(text)
    except HostError as error:
        raise _moved(error, start - 1) from None
    return found


def _moved(error: HostError, count: int) -> HostError:
    """Returns a syntax error whose position is `count` bytes further on."""
    found = _POSITION.search(error.message)
    if found is None:
        return error
    message = f"{error.message[: found.start()]}{int(found.group()) + count}"
    return HostError(error.code, message)

"""A JSON parser that reports syntax errors with Triton's texts and positions.

The parser is iterative, so nesting depth is not limited. It accepts Triton's extensions of JSON:
`NaN`, `Inf`, `Infinity`, their negatives, and strings of any bytes (docs/reference/protocol.md,
"JSON over HTTP").
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from host.errors import ErrorCode, HostError, internal

MAX_VALUES = 50_000
"""The maximum number of values outside of flat number arrays; reading them takes at most 0.5 s."""

MAX_ARRAYS = 500_000
"""The maximum number of arrays whose first element is an array."""

_NO_COMMA_IN_ARRAY = "Missing a comma or ']' after an array element."
_NO_COMMA_IN_OBJECT = "Missing a comma or '}' after an object member."
_MAX_INTEGER_DIGITS = 22  # longer integers are stored as doubles, as in Triton

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # UTF-8; some clients send it first
_SPACE = re.compile(rb"[ \t\n\r]*")
_OPENINGS = re.compile(rb"(?:\[[ \t\n\r]*)+(?=\[)")
_CLOSINGS = re.compile(rb"[ \t\n\r]*(?:\][ \t\n\r]*){2,}")
_STRUCTURE = re.compile(rb'[\[\]{}"]')
_PLAIN = rb'[^"\\\x00-\x1f]*'
_STRING_PART = re.compile(_PLAIN + rb'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})' + _PLAIN + rb")*")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]*)?")
_NAN_OR_INFINITY = re.compile(rb"-?(?:NaN|Inf(?:inity)?)")
_LITERALS = {b"t": (b"true", True), b"f": (b"false", False), b"n": (b"null", None)}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u(....)|(.))"
)


class JsonObject(dict[str, Any]):
    """An object with a repeated name. The first one counts; `pairs` has all members."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(reversed(pairs))
        self.pairs = pairs


class JsonTooLarge(HostError):
    """The text has more values than the limit of this parser."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INTERNAL, message)


def read(text: bytes) -> Any:
    """Parses a JSON text; an object with a repeated name becomes a JsonObject.

    Raises HostError INTERNAL.
    """
    return _Reader(text).document()


class _Reader:
    def __init__(self, text: bytes) -> None:
        self._text = text
        self._position = len(_BYTE_ORDER_MARK) if text.startswith(_BYTE_ORDER_MARK) else 0
        self._values = self._arrays = 0

    def document(self) -> Any:
        self._skip_space()
        if self._position == len(self._text):
            raise self._syntax_error("The document is empty.")
        value = self._value()
        self._skip_space()
        # C clients may send the terminating null byte.
        if self._text[self._position : self._position + 1] not in (b"", b"\0"):
            raise self._syntax_error("The document root must not be followed by other values.")
        return value

    def _value(self) -> Any:
        """Parses one value. An explicit stack holds the enclosing arrays and objects."""
        # An entry is the elements of an array and None, or the members of an object and the name
        # whose value is being parsed.
        stack: list[tuple[list[Any], list[str] | None]] = []
        while True:
            self._open_arrays(stack)
            value, opened = self._scalar_or_opening()
            if opened is not None:
                stack.append(opened)
                if opened[1] is not None:
                    opened[1].append(self._member_name())
                continue
            while True:  # add the complete value to its array or object
                value = self._close_arrays(stack, value)
                if not stack:
                    return value
                elements, names = stack[-1]
                if names is None:
                    elements.append(value)
                    if self._has_next_element(b"]", _NO_COMMA_IN_ARRAY):
                        break
                    value = elements
                else:
                    elements.append((names.pop(), value))
                    if self._has_next_element(b"}", _NO_COMMA_IN_OBJECT):
                        names.append(self._member_name())
                        break
                    value = _make_object(elements)
                stack.pop()

    def _open_arrays(self, stack: list[tuple[list[Any], list[str] | None]]) -> None:
        """Pushes all arrays that begin here and whose first element is an array."""
        self._skip_space()
        run = _OPENINGS.match(self._text, self._position)
        if run is None:
            return
        count = run.group().count(b"[")
        self._arrays += count
        if self._arrays > MAX_ARRAYS:
            raise JsonTooLarge(
                self._syntax_error(f"More than {MAX_ARRAYS} arrays in arrays.").message
            )
        self._position = run.end()
        stack += [([], None) for _ in range(count)]

    def _close_arrays(self, stack: list[tuple[list[Any], list[str] | None]], value: Any) -> Any:
        """Pops the arrays that end directly after this value; returns the outermost one.

        Returns the value if no array or only one ends here.
        """
        run = _CLOSINGS.match(self._text, self._position)
        if run is None:
            return value
        count = run.group().count(b"]")
        ending = stack[-count:]
        if len(ending) < count or any(names is not None for _, names in ending):
            return value  # a syntax error, which the caller reports
        self._position = run.end()
        del stack[-count:]
        for elements, _ in reversed(ending):
            elements.append(value)
            value = elements
        return value

    def _scalar_or_opening(self) -> tuple[Any, tuple[list[Any], list[str] | None] | None]:
        self._values += 1
        if self._values > MAX_VALUES:
            raise JsonTooLarge(self._syntax_error(f"More than {MAX_VALUES} values.").message)
        self._skip_space()
        first = self._text[self._position : self._position + 1]
        if first == b"[":
            flat = self._flat_array()
            if flat is not None:
                return flat, None
            self._position += 1
            self._skip_space()
            if self._text[self._position : self._position + 1] == b"]":
                self._position += 1
                return [], None
            return None, ([], None)
        if first == b"{":
            self._position += 1
            self._skip_space()
            if self._text[self._position : self._position + 1] == b"}":
                self._position += 1
                return {}, None
            return None, ([], [])
        if first == b'"':
            return self._string(), None
        if first in _LITERALS:
            return self._literal(*_LITERALS[first]), None
        return self._number(), None

    def _flat_array(self) -> list[Any] | None:
        """Parses a flat array of numbers at once; None if another value begins here."""
        end = _STRUCTURE.search(self._text, self._position + 1)
        if end is None or end.group() != b"]":
            return None
        part = self._text[self._position : end.end()].replace(b"Infinity", b"Inf")
        try:
            # Other bytes than ASCII are an error here, as is all else that json does not accept.
            flat: list[Any] = json.loads(part.decode("ascii").replace("Inf", "Infinity"))
        except (ValueError, RecursionError):
            return None
        if flat.count(math.inf) + flat.count(-math.inf) > part.count(b"Inf"):
            return None  # a number that is too large for a double
        self._position = end.end()
        return flat

    def _has_next_element(self, closing: bytes, complaint: str) -> bool:
        """Returns whether another element follows; otherwise skip the closing bracket."""
        self._skip_space()
        sign = self._text[self._position : self._position + 1]
        if sign not in (b",", closing) or not sign:
            raise self._syntax_error(complaint)
        self._position += 1
        return sign == b","

    def _member_name(self) -> str:
        self._skip_space()
        if self._text[self._position : self._position + 1] != b'"':
            raise self._syntax_error("Missing a name for object member.")
        name = self._string()
        self._skip_space()
        if self._text[self._position : self._position + 1] != b":":
            raise self._syntax_error("Missing a colon after a name of object member.")
        self._position += 1
        return name

    def _string(self) -> str:
        start = self._position + 1
        found = _STRING_PART.match(self._text, start)
        assert found is not None
        self._position = found.end()
        if self._text[self._position : self._position + 1] != b'"':
            raise self._bad_string()
        self._position += 1
        text = found.group().decode("utf-8", "surrogateescape")
        if "\\" not in text:
            return text
        try:
            return _ESCAPE.sub(_unescape, text)
        except ValueError:
            self._position = start + _find_lone_surrogate(text)
            raise self._syntax_error("The surrogate pair in string is invalid.") from None

    def _bad_string(self) -> HostError:
        rest = self._text[self._position : self._position + 2]
        if not rest or rest[0] == 0:
            return self._syntax_error("Missing a closing quotation mark in string.")
        if rest == b"\\u":
            return self._syntax_error("Incorrect hex digit after \\u escape in string.")
        return self._syntax_error("Invalid escape character in string.")

    def _literal(self, word: bytes, value: Any) -> Any:
        for byte in word:
            if self._text[self._position : self._position + 1] != bytes((byte,)):
                raise self._syntax_error("Invalid value.")
            self._position += 1
        return value

    def _number(self) -> int | float:
        found = _NUMBER.match(self._text, self._position)
        if found is None:
            return self._nan_or_infinity()
        fraction, exponent = found.groups()
        if fraction == b".":
            self._position = found.end(1)
            raise self._syntax_error("Miss fraction part in number.")
        if exponent is not None and not exponent[-1:].isdigit():
            self._position = found.end(2)
            raise self._syntax_error("Miss exponent in number.")
        digits = found.group()
        if fraction is None and exponent is None and len(digits) < _MAX_INTEGER_DIGITS:
            self._position = found.end()
            return int(digits)
        value = float(digits)
        if math.isinf(value):
            raise self._syntax_error("Number too big to be stored in double.")
        self._position = found.end()
        return value

    def _nan_or_infinity(self) -> float:
        found = _NAN_OR_INFINITY.match(self._text, self._position)
        if found is None:
            if self._text[self._position : self._position + 1] == b"-":
                self._position += 1
            first = self._text[self._position : self._position + 1]
            # Raises at the first byte that differs.
            self._literal(b"NaN" if first == b"N" else b"Inf", None)
        else:
            self._position = found.end()
            return float(found.group())
        raise AssertionError("unreachable: NaN or Infinity was not matched")

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._position)
        assert found is not None
        self._position = found.end()

    def _syntax_error(self, reason: str) -> HostError:
        return internal(f"failed to parse the request JSON buffer: {reason} at {self._position}")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    return plain if len(plain) == len(pairs) else JsonObject(pairs)


def _unescape(found: re.Match[str]) -> str:
    high, low, code, letter = found.groups()
    if letter is not None:
        return _ESCAPES.get(letter, letter)
    if high is not None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if 0xD800 <= int(code, 16) < 0xE000:
        raise ValueError("half of a surrogate pair")
    return chr(int(code, 16))


def _find_lone_surrogate(text: str) -> int:
    """Returns the byte position of the first escape that is half of a surrogate pair."""
    for found in _ESCAPE.finditer(text):
        try:
            _unescape(found)
        except ValueError:
            return len(text[: found.start()].encode("utf-8", "surrogateescape"))
    return 0

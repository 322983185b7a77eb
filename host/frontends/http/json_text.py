"""Reads and writes the JSON of HTTP clients (docs/reference/protocol.md, "JSON over HTTP").

msgspec decodes standard JSON, and orjson writes arrays of numbers. `json_reader` reads the
extensions (`NaN`, repeated names, invalid UTF-8, any nesting depth) and reports syntax errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from host.errors import ErrorCode, HostError, internal
from host.frontends.http.json_reader import JsonObject, JsonTooLarge, read

_NEEDS_ESCAPE = re.compile(rb'[\x00-\x1f"\\]')
_SHORT_ESCAPES = {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}

_MAX_CONTAINERS = 4_000_000
"""The maximum number of arrays and objects; as Python objects, they take 60 times the memory."""

_SHORT_EXPONENT = re.compile(rb"e(-6|1[6-9]|20)(?![0-9])")
"""The exponents that orjson writes and Triton does not. (A pattern that begins with a digit would
be tried at every digit.)"""

_NOT_FINITE = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}

_MANY_BYTES = 4096
"""From this length, numpy counts faster than `bytes.count`."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_INT64 = 1 << 63
_UINT64 = 1 << 64


class SlowText(HostError):
    """The text needs the slow parser, which the caller has not allowed."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.INTERNAL, "the request JSON cannot be read in the event loop")


def parse(text: bytes, may_be_slow: bool = True) -> Any:
    """Parses a JSON text; an object with a repeated name becomes a JsonObject.

    Invalid UTF-8 in strings becomes lone surrogates (`surrogateescape`). Raises HostError INTERNAL;
    SlowText if only `json_reader` can read the text, and `may_be_slow` is false.
    """
    if len(text) > _MAX_CONTAINERS and text.count(b"[") + text.count(b"{") > _MAX_CONTAINERS:
        raise internal(
            f"the request JSON has more than {_MAX_CONTAINERS} arrays and objects; send tensors as"
            " flat arrays, or as binary data"
        )
    try:
        value = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if not may_be_slow:
            raise SlowText from None
        return _read_leniently(text)
    # The first of equal names counts, but msgspec keeps the last. Compare the number of members
    # with the number of names to find repeated names.
    if _count_names(text) == _count_members(value):
        return value
    if not may_be_slow:
        raise SlowText
    try:
        return read(text)
    except JsonTooLarge:
        return value


def _read_leniently(text: bytes) -> Any:
    try:
        return read(text)
    except JsonTooLarge:
        try:  # faster, but of the extensions it accepts only `NaN`
            return json.loads(text.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            pass
        raise


def _count_names(text: bytes) -> int:
    """Counts the names of all objects, and the strings that contain `":`."""
    if len(text) < _MANY_BYTES:
        names = text.count(b'":')
    else:
        letters = np.frombuffer(text, np.uint8)
        names = int(np.count_nonzero((letters[:-1] == ord('"')) & (letters[1:] == ord(":"))))
    return names - text.count(b'\\":') if b"\\" in text else names


def _count_members(value: Any) -> int:
    """Counts the members of the objects that a normal request has."""
    if type(value) is not dict:
        return 0
    count = len(value)
    for member in value.values():
        if type(member) is dict:
            count += _count_members(member)
        elif type(member) is list and member and type(member[0]) is dict:
            count += sum(map(_count_members, member))
    return count


def member(owner: Any, name: str) -> Any:
    """Returns a member of an object. Raises HostError INTERNAL if it is absent."""
    if isinstance(owner, dict) and name in owner:
        return owner[name]
    raise internal(f"attempt to access non-existing object member '{name}'")


def members(value: Any) -> list[tuple[str, Any]]:
    """Returns all members in order, including repeated names. Raises HostError INTERNAL."""
    if not isinstance(value, dict):
        raise internal("attempt to get members for non-object")
    if isinstance(value, JsonObject):
        return value.pairs
    return list(value.items())


def as_text(value: Any) -> str:
    """Returns a value that is a valid string. Raises HostError INTERNAL."""
    if type(value) is not str:
        raise wrong_type("string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise internal("attempt to access JSON string that is not valid UTF-8") from None
    return value


def as_bool(value: Any) -> bool:
    """Returns a value that is a boolean. Raises HostError INTERNAL."""
    if type(value) is not bool:
        raise wrong_type("boolean")
    return value


def as_unsigned(value: Any) -> int:
    """Returns a value that is an unsigned 64-bit integer. Raises HostError INTERNAL."""
    if not is_unsigned(value):
        raise wrong_type("unsigned-integer")
    return int(value)


def as_array(value: Any) -> list[Any]:
    """Returns a value that is an array. Raises HostError INTERNAL."""
    if type(value) is not list:
        raise wrong_type("array")
    return value


def is_unsigned(value: Any) -> bool:
    """Returns whether a value is an unsigned 64-bit integer."""
    return type(value) is int and 0 <= value < _UINT64


def is_signed(value: Any) -> bool:
    """Returns whether a value is a signed 64-bit integer."""
    return type(value) is int and -_INT64 <= value < _INT64


def wrong_type(expected: str) -> HostError:
    """Returns the error for a value that does not have the expected type."""
    return internal(f"attempt to access JSON non-{expected} as {expected}")


def with_context(context: str, error: HostError) -> HostError:
    """Returns the error with a context before its message."""
    return HostError(error.code, f"{context}: {error.message}")


def dump(value: Any) -> bytes:
    """Writes plain data as compact JSON. Lone surrogates become question marks."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, ValueError):
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def dump_numbers(values: npt.NDArray[Any]) -> bytes:
    """Writes a flat array of numbers or booleans, with `NaN`, `Infinity` and `-Infinity`.

    Floating-point numbers are FP64. As in Triton, they have an exponent below 1e-6 and from 1e21.
    """
    text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    if values.dtype.kind != "f":
        return text
    if b"e" in text:
        text = _write_exponents(text)
    if b"n" in text:  # a `null`, which stands for a number that is not finite
        return _name_not_finite(text, values)
    return text


def _write_exponents(text: bytes) -> bytes:
    """Returns the text of a flat array with the exponents that Triton writes, without `+`."""
    text = text.replace(b"+", b"")  # only exponents have a sign that JSON does not need
    pieces: list[bytes] = []
    written = 0
    for found in _SHORT_EXPONENT.finditer(text):
        end = found.start()
        start = text.rfind(b",", written, end) + 1 or 1  # the first number follows a `[`
        pieces += text[written:start], _without_exponent(text[start:end], found[1])
        written = found.end()
    return b"".join([*pieces, text[written:]]) if pieces else text


def _without_exponent(digits: bytes, exponent: bytes) -> bytes:
    if exponent == b"-6":
        sign, digits = (b"-", digits[1:]) if digits.startswith(b"-") else (b"", digits)
        return sign + b"0.00000" + digits.replace(b".", b"")
    whole, _, fraction = digits.partition(b".")
    return whole + fraction.ljust(int(exponent), b"0") + b".0"


def _name_not_finite(text: bytes, values: npt.NDArray[Any]) -> bytes:
    """Returns the text with the names of numbers instead of `null`."""
    names = [_NOT_FINITE[str(value)] for value in values[~np.isfinite(values)]]
    head, *parts = text.split(b"null")
    return b"".join([head, *(piece for pair in zip(names, parts, strict=True) for piece in pair)])


def dump_strings(values: Sequence[bytes]) -> bytes:
    """Writes a flat array of strings; the bytes can be invalid UTF-8."""
    try:
        return _encode([value.decode() for value in values])
    except UnicodeDecodeError:
        return b"[" + b",".join(map(_quote_bytes, values)) + b"]"


def _quote_bytes(value: bytes) -> bytes:
    return b'"' + _NEEDS_ESCAPE.sub(_escape, value) + b'"'


def _escape(found: re.Match[bytes]) -> bytes:
    code = found.group()[0]
    return _SHORT_ESCAPES.get(code) or b"\\u%04x" % code


def error_body(message: str) -> bytes:
    """Returns the body of an error response (docs/reference/protocol.md, "Error codes")."""
    return dump({"error": message})

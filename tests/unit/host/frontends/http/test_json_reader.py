"""Error messages and positions of invalid JSON (docs/reference/protocol.md, "JSON over HTTP")."""

from __future__ import annotations

import math

import pytest

from host.errors import ErrorCode, HostError
from host.frontends.http import json_reader, json_text

WRONG: dict[str, tuple[bytes, str, int]] = {
    "nothing": (b"", "The document is empty.", 0),
    "space": (b" \n", "The document is empty.", 2),
    "two values": (b"{} {}", "The document root must not be followed by other values.", 3),
    "a word": (b"tru", "Invalid value.", 3),
    "another case": (b"True", "Invalid value.", 0),
    "a special number in part": (b"-I", "Invalid value.", 2),
    "a name without quotes": (b"{a:1}", "Missing a name for object member.", 1),
    "a comma at the end": (b'{"a":1,}', "Missing a name for object member.", 7),
    "no colon": (b'{"a" 1}', "Missing a colon after a name of object member.", 5),
    "no comma in an object": (
        b'{"a":1 "b":2}',
        "Missing a comma or '}' after an object member.",
        7,
    ),
    "no comma in an array": (b"[1 2]", "Missing a comma or ']' after an array element.", 3),
    "no end of an array": (b"[1", "Missing a comma or ']' after an array element.", 2),
    "no end of a string": (b'"abc', "Missing a closing quotation mark in string.", 4),
    "an unknown escape": (b'"\\x"', "Invalid escape character in string.", 1),
    "bad digits": (b'"\\u12g4"', "Incorrect hex digit after \\u escape in string.", 1),
    "half a pair": (b'"a\\ud800"', "The surrogate pair in string is invalid.", 2),
    "no fraction": (b"1.", "Miss fraction part in number.", 2),
    "no exponent": (b"1e", "Miss exponent in number.", 2),
    "no double": (b"1e999", "Number too big to be stored in double.", 0),
    "no double beside infinity": (
        b"[Infinity,1e999]",
        "Number too big to be stored in double.",
        10,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_syntax_errors_name_reason_and_position(case: str) -> None:
    text, reason, place = WRONG[case]
    for read in (json_text.parse, json_reader.read):
        with pytest.raises(HostError) as caught:
            read(text)
        assert caught.value.code is ErrorCode.INTERNAL
        assert caught.value.message == (
            f"failed to parse the request JSON buffer: {reason} at {place}"
        )


def test_invalid_numbers_are_rejected() -> None:
    for parse in (json_text.parse, json_reader.read):
        read = parse(b"[NaN, Inf, -Inf, Infinity, -Infinity, {}]")
        assert math.isnan(read[0])
        assert read[1:5] == [math.inf, -math.inf, math.inf, -math.inf]


def test_a_byte_order_mark_is_skipped() -> None:
    assert json_text.parse(b'\xef\xbb\xbf{"a":1}') == {"a": 1}
    with pytest.raises(HostError, match="Invalid value. at 3"):
        json_text.parse(b"\xef\xbb\xbf\xef\xbb\xbf{}")


def test_a_trailing_null_byte_is_accepted() -> None:
    assert json_text.parse(b'{"a":1}\0') == {"a": 1}
    assert json_text.parse(b'{"a":1} \0rubbish') == {"a": 1}


@pytest.mark.parametrize("padding", [b"", b" " * 5000], ids=["short", "long"])
def test_duplicate_names_keep_the_first_value_and_all_pairs(padding: bytes) -> None:
    read = json_text.parse(padding + b'{"a":1,"b":{"c":2,"c":3},"a":4}')
    assert (read["a"], read["b"]["c"]) == (1, 2)
    assert json_text.members(read) == [("a", 1), ("b", {"c": 2}), ("a", 4)]


@pytest.mark.parametrize("padding", [b"", b" " * 5000], ids=["short", "long"])
def test_texts_that_look_like_names_are_no_duplicate_names(padding: bytes) -> None:
    read = json_text.parse(padding + rb'{"a":1,"b":"\":\":"}')
    assert not isinstance(read, json_reader.JsonObject)
    assert read == {"a": 1, "b": '":":'}


def test_bytes_that_are_not_utf_8_are_preserved() -> None:
    (read,) = json_text.parse(b'["\xff\xc3\xbc"]')
    assert read.encode("utf-8", "surrogateescape") == b"\xff\xc3\xbc"


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'], ids=["arrays", "objects", "both"])
def test_any_nesting_depth_is_read(opening: bytes) -> None:
    closing = {b"[": b"]", b"{": b"}"}
    ends = b"".join(closing.get(bytes([byte]), b"") for byte in reversed(opening))
    value = json_text.parse(opening * 20_000 + b"0" + ends * 20_000)
    for _ in range(20_000):
        while isinstance(value, (list, dict)):
            value = value[0] if isinstance(value, list) else value["a"]
    assert value == 0


def test_more_arrays_than_fit_into_memory_are_refused() -> None:
    with pytest.raises(HostError) as caught:
        json_text.parse(b"[" + b"[]," * 4_000_000 + b"[]]")
    assert caught.value.message == (
        "the request JSON has more than 4000000 arrays and objects; send tensors as flat arrays,"
        " or as binary data"
    )


TYPES = {
    "array": json_text.as_array,
    "string": json_text.as_text,
    "boolean": json_text.as_bool,
    "unsigned-integer": json_text.as_unsigned,
}


@pytest.mark.parametrize("kind", TYPES)
def test_a_value_of_another_type_is_named(kind: str) -> None:
    with pytest.raises(HostError) as caught:
        TYPES[kind](-1)
    assert caught.value.message == f"attempt to access JSON non-{kind} as {kind}"


def test_a_missing_member_is_named() -> None:
    owners: list[object] = [{}, [], 7]
    for owner in owners:
        with pytest.raises(HostError) as caught:
            json_text.member(owner, "a")
        assert caught.value.message == "attempt to access non-existing object member 'a'"
    with pytest.raises(HostError) as caught:
        json_text.members([])
    assert caught.value.message == "attempt to get members for non-object"

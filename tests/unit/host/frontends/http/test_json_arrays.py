"""Large arrays of a JSON text: the pieces have what the parsers of whole texts read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.errors import HostError
from host.frontends.http import json_text
from host.frontends.http.inference_header import InferenceHeaderReader
from host.frontends.http.json_arrays import CutText
from host.frontends.http.tensors import flatten

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SPECIAL = st.sampled_from([float("inf"), float("-inf")])
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | FINITE | SPECIAL | st.booleans() | st.none()
STRINGS = st.text(st.sampled_from('ab"\\[]{},: \t\u00e9\U0001f600') | st.characters(codec="utf-8"))
SPACES = st.sampled_from(["", " ", "\n", " \t\r\n "])


def nested(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    inner = st.recursive(
        elements, lambda children: st.lists(children, min_size=1, max_size=4), max_leaves=20
    )
    return st.lists(inner, min_size=1, max_size=8)


ARRAYS = nested(NUMBERS) | nested(STRINGS)


def cut_in_small_pieces(text: bytes) -> CutText:
    return CutText(text, max_arrays=10, min_bytes=1, piece_bytes=4)


def read_in_pieces(text: bytes) -> Any:
    """The document, with the flat elements of each array that was cut out."""
    cut = cut_in_small_pieces(text)
    try:
        document = json_text.parse(cut.rest)
    except HostError as error:
        raise cut.original_error(error) from None
    for entry in document:
        array = cut.array(entry["data"])
        entry["data"] = flatten(entry["data"] if array is None else [v for p in array for v in p])
    return document


def read_at_once(text: bytes) -> Any:
    document = json_text.parse(text)
    for entry in document:
        entry["data"] = flatten(entry["data"])
    return document


def written(arrays: list[list[Any]], space: str, ascii_only: bool) -> bytes:
    text = json.dumps(
        [{"name": '] "data":[1', "data": array, "shape": [1, 2]} for array in arrays],
        separators=(f"{space},{space}", f"{space}:{space}"),
        ensure_ascii=ascii_only,
    )
    return text.encode()


@given(st.lists(ARRAYS, max_size=3), SPACES, st.booleans())
def test_arrays_in_pieces_have_the_elements_of_the_whole(
    arrays: list[list[Any]], space: str, ascii_only: bool
) -> None:
    text = written(arrays, space, ascii_only)
    assert read_in_pieces(text) == read_at_once(text)
    cut = cut_in_small_pieces(text)
    found = [cut.array(entry["data"]) for entry in json_text.parse(cut.rest)]
    assert None not in found  # each of these arrays can be cut out


@given(st.lists(nested(NUMBERS | STRINGS | st.just([]) | st.just({})), max_size=3), SPACES)
def test_arrays_of_anything_are_left_in_the_text_or_read_alike(
    arrays: list[list[Any]], space: str
) -> None:
    text = written(arrays, space, True)
    assert read_in_pieces(text) == read_at_once(text)


@given(
    st.lists(ARRAYS, min_size=1, max_size=2),
    SPACES,
    st.integers(0, 10_000),
    st.sampled_from([b"", *(bytes((byte,)) for byte in b'[]{},:"\\ 1-.eNx\xff\x00')]),
)
def test_damaged_texts_are_refused_in_pieces_too(
    arrays: list[list[Any]], space: str, place: int, damage: bytes
) -> None:
    text = written(arrays, space, True)
    place %= len(text)
    damaged = text[:place] + damage + text[place + 1 :]
    try:
        expected = read_at_once(damaged)
    except (HostError, TypeError, KeyError, AttributeError) as error:
        with pytest.raises(type(error)) as refused:
            read_in_pieces(damaged)
        assert str(refused.value) == str(error)
        return
    assert read_in_pieces(damaged) == expected


def test_the_first_of_two_errors_is_reported() -> None:
    """The array that is cut out ends early, with an error, and its rest is one too."""
    text = b'[{"data":[[nul] , Infinity , null]] , "shape":[1]}]'
    with pytest.raises(HostError, match="Invalid value. at 14"):
        read_at_once(text)
    with pytest.raises(HostError, match="Invalid value. at 14"):
        read_in_pieces(text)


@pytest.mark.parametrize(
    "array", [b"[1,2,3, ,4]", b"[1,2,3,,4]", b"[[1,2],,3]", b"[1,2,3,4,]", b"[1,[2],[,3]]"]
)
def test_a_missing_number_is_an_error(array: bytes) -> None:
    with pytest.raises(HostError, match="Invalid value"):
        read_in_pieces(b'[{"data":' + array + b"}]")


def request(data: bytes, datatype: bytes = b"INT32", shape: bytes = b"[100000]") -> bytes:
    return b'{"id":"1","inputs":[{"name":"i","datatype":"%b","shape":%b,"data":%b}]}' % (
        datatype,
        shape,
        data,
    )


def head_of(text: bytes, **counts: int) -> Any:
    return InferenceHeaderReader(1 << 24).read_large(text, **counts)


@pytest.mark.parametrize("data", [b"[%b]", b"[[%b]]"], ids=["flat", "nested"])
def test_errors_in_large_arrays_have_their_texts_and_positions(data: bytes) -> None:
    many = b"7," * 99_999
    assert len(head_of(request(data % (many + b"7"))).inputs[0].data) == 400_000
    for last, error in {
        b"7,7": "Unable to parse 'data': Shape does not match true shape of 'data' field",
        b"true": "Unable to parse 'data': attempt to access JSON non-signed-integer as"
        " signed-integer",
        b"7 7": "failed to parse the request JSON buffer: Missing a comma or ']' after an array"
        " element. at ",
        b"x": "failed to parse the request JSON buffer: Invalid value. at ",
    }.items():
        text = request(data % (many + last))
        if error.endswith(" at "):
            error += str(text.index(last) + 2 * (last == b"7 7"))
        with pytest.raises(HostError) as refused:
            head_of(text)
        assert refused.value.message == error
    with pytest.raises(HostError, match="Failed to parse 'data' field: shape does not match true"):
        head_of(request(data % many[:-1]))


def test_large_arrays_of_strings_are_encoded() -> None:
    data = json.dumps([["ab", "]"]] * 50_000).encode()
    found = head_of(request(data, b"BYTES", b"[50000,2]")).inputs[0].data
    assert found == b"\2\0\0\0ab\1\0\0\0]" * 50_000


def test_the_text_beside_large_arrays_is_limited() -> None:
    data = b"[" + b"1," * 99_999 + b"1]"
    head_of(request(data))
    with pytest.raises(HostError, match=r"at most 8388608 bytes besides tensor data in the req"):
        head_of(request(data).replace(b'"id":"1"', b'"id":"%b"' % (b"1" * 8388608)))
    names = b",".join(b'"%d":0' % number for number in range(400_000))
    with pytest.raises(HostError, match=r"at most 393216 values besides tensor data in the req"):
        head_of(request(data).replace(b'"id":"1"', names))


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_more_tensors_than_the_model_has_or_the_limit_are_refused(name: str) -> None:
    def text(count: int) -> bytes:
        entries: dict[str, Any] = {"inputs": [], name: [{"name": "a"}] * count}
        if name == "inputs":
            for entry in entries["inputs"]:
                entry |= {"datatype": "INT32", "shape": [1], "data": [1]}
        return json.dumps(entries).encode()

    def tensors(count: int, **counts: int) -> Any:
        found = getattr(head_of(text(count), **counts), name)
        if isinstance(found, HostError):
            raise found
        return found

    assert len(tensors(2048)) == 2048
    with pytest.raises(HostError, match=f"at most 2048 '{name}' in the request JSON, but got 2049"):
        tensors(2049)
    assert len(tensors(3000, **{name: 3000})) == 3000
    with pytest.raises(HostError, match=f"at most 3000 '{name}' in the request JSON, but got 3001"):
        tensors(3001, **{name: 3000})


@pytest.mark.parametrize(
    "array",
    [
        b"[" * 200_000 + b"1" + b"]" * 200_000,
        b"[" + b" " * 200_000 + b"1]",
        b"[1," + b"1" * 200_000 + b",2]",
    ],
    ids=["openings", "spaces", "a number"],
)
def test_an_array_with_a_long_gap_is_left_in_the_text(array: bytes) -> None:
    """No piece of it would be short, and a search for the end of one holds the interpreter."""
    text = b'[{"data":' + array + b',"name":"x"}]'
    assert CutText(text, max_arrays=10, min_bytes=1).rest == text


def test_an_array_with_short_gaps_is_cut_out() -> None:
    cut = CutText(b'[{"data":[' + b" " * 60_000 + b"1" * 20 + b"]}]", max_arrays=10, min_bytes=1)
    assert len(cut.rest) < 100

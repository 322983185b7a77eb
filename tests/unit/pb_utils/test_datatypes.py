"""Codes and numpy types of the data types."""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pb_utils import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from pb_utils._datatypes import BYTES, INVALID, code_of
from tests.unit.pb_utils.tensors import BFLOAT16, NUMERIC


def test_every_configuration_type_but_bf16_has_a_numpy_type() -> None:
    assert list(TRITON_STRING_TO_NUMPY) == [
        "TYPE_BOOL",
        *(f"TYPE_{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)),
        *(f"TYPE_FP{bits}" for bits in (16, 32, 64)),
        "TYPE_STRING",
    ]
    assert triton_string_to_numpy("TYPE_BOOL") is bool
    assert triton_string_to_numpy("TYPE_FP32") is np.float32
    assert triton_string_to_numpy("TYPE_STRING") is np.object_
    with pytest.raises(KeyError):
        triton_string_to_numpy("TYPE_BF16")


@pytest.mark.parametrize(("code", "kind"), [*NUMERIC.items(), (13, np.object_)])
def test_codes_and_numpy_types_map_both_ways(code: int, kind: type[Any]) -> None:
    assert triton_to_numpy_type(code) is kind
    assert numpy_to_triton_type(kind) == code
    assert numpy_to_triton_type(np.dtype(kind)) == code
    assert code_of(np.dtype(kind)) == code


@pytest.mark.parametrize("code", [-1, 0, 14, 15, None, 1.5, "1", (), np.ones(2)])
def test_other_values_have_no_numpy_type(code: Any) -> None:
    assert triton_to_numpy_type(code) is None


class Undecided:
    """Its comparisons give what is neither true nor false, as those of torch's tensors do."""

    def __eq__(self, other: object) -> Any:
        return self

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")


def test_what_cannot_be_compared_with_a_code_has_no_numpy_type() -> None:
    assert triton_to_numpy_type(cast(int, Undecided())) is None


def test_numpy_bytes_maps_to_bytes_only_without_a_width() -> None:
    assert numpy_to_triton_type(np.bytes_) == BYTES
    assert numpy_to_triton_type(np.dtype("S5")) is None


@pytest.mark.parametrize("kind", [np.complex64, np.str_, np.dtype(">f4"), BFLOAT16, float])
def test_types_unknown_to_triton_have_no_code(kind: Any) -> None:
    assert numpy_to_triton_type(kind) is None


@pytest.mark.parametrize("name", ["q", "Q", "l", "L", "i"])
def test_every_alias_of_an_integer_type_has_a_code(name: str) -> None:
    dtype = np.dtype(name)
    assert code_of(dtype) == numpy_to_triton_type(dtype.type) or dtype.itemsize == 8
    assert code_of(dtype) != INVALID


def objects(*elements: object) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def reference(elements: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


elements = st.one_of(
    st.lists(st.binary(max_size=40)),
    st.builds(lambda data, n: [data] * n, st.binary(max_size=64), st.integers(0, 200)),
    st.builds(
        lambda size, rows: [bytes(row[:size]).ljust(size, b"\0") for row in rows],
        st.integers(1, 40),
        st.lists(st.binary(max_size=40), min_size=50, max_size=80),
    ),
)


@given(elements)
def test_elements_round_trip_in_the_documented_form(given_elements: list[bytes]) -> None:
    encoded = serialize_byte_tensor(objects(*given_elements))
    assert (encoded or b"") == reference(given_elements)
    decoded = deserialize_bytes_tensor(encoded or b"")
    assert decoded.dtype == np.object_
    assert decoded.shape == (len(given_elements),)
    assert decoded.tolist() == given_elements
    assert all(type(element) is bytes for element in decoded)


@given(st.binary(max_size=2000))
def test_decoded_data_encodes_to_the_same_bytes(data: bytes) -> None:
    try:
        decoded = deserialize_bytes_tensor(data)
    except struct.error:
        return
    assert reference(decoded.tolist()) == data


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("missing", [1, 5, 7])
def test_truncated_data_is_a_struct_error(count: int, missing: int) -> None:
    with pytest.raises(struct.error):
        deserialize_bytes_tensor(reference([b"abcd"] * count)[:-missing])


def test_elements_of_different_lengths_in_a_divisible_buffer_are_decoded() -> None:
    parts = [b"x" * 4] * 200 + [b"x" * 12] + [b"x" * 4] * 200
    assert deserialize_bytes_tensor(reference(parts)).tolist() == parts


def test_only_exact_bytes_are_not_converted() -> None:
    encoded = serialize_byte_tensor(objects(b"raw", "\u00e4", 5, None, np.bytes_(b"np")))
    assert isinstance(encoded, bytes)
    assert deserialize_bytes_tensor(encoded).tolist() == [
        b"raw",
        "\u00e4".encode(),
        b"5",
        b"None",
        b"b'np'",
    ]


def test_elements_are_taken_in_c_order() -> None:
    array = objects(b"1", b"22", b"333", b"4444").reshape(2, 2)
    assert serialize_byte_tensor(array.T) == reference([b"1", b"333", b"22", b"4444"])


def test_arrays_of_fixed_width_lose_trailing_nuls_only() -> None:
    array = np.array([b"a\0", b"\0b", b"abc"], dtype="S3")
    assert serialize_byte_tensor(array) == reference([b"a", b"\0b", b"abc"])


def test_empty_array_gives_an_empty_tuple_and_another_dtype_none() -> None:
    assert serialize_byte_tensor(np.array([], dtype=np.object_)) == ()
    assert serialize_byte_tensor(np.array([], dtype=np.float32)) == ()
    assert serialize_byte_tensor(np.array([1.0])) is None
    assert serialize_byte_tensor(np.array(["text"])) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_decoded(kind: type[bytes]) -> None:
    parts = [b"ab"] * 400
    assert deserialize_bytes_tensor(kind(reference(parts))).tolist() == parts
    as_array = np.frombuffer(reference(parts), np.uint8)
    assert deserialize_bytes_tensor(as_array).tolist() == parts
    spread = np.repeat(as_array, 2)[::2]
    assert deserialize_bytes_tensor(spread).tolist() == parts

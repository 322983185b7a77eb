"""Codes and numpy types of the data types."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from pb_utils import (
    TRITON_STRING_TO_NUMPY,
    numpy_to_triton_type,
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

"""Formatting tensors for trace files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from host.errors import internal
from host.inference.request import Tensor
from host.inference.shared_memory_bytes import SharedMemoryBytes
from host.tracing.tensors import elements, tensor_json


@pytest.mark.parametrize(
    ("datatype", "array", "text"),
    [
        ("BOOL", np.array([True, False]), "1,0"),
        ("INT8", np.array([-1, 2], np.int8), "-1,2"),
        ("UINT64", np.array([2**64 - 1], np.uint64), "18446744073709551615"),
        ("FP32", np.array([0.1, 1e9, -0.5], np.float32), "0.1,1e+09,-0.5"),
        ("FP64", np.array([np.nan, np.inf]), "nan,inf"),
        ("FP16", np.array([1], np.float16), ""),
        ("INT32", np.array([], np.int32), ""),
    ],
)
def test_elements_are_joined_by_commas(datatype: str, array: npt.NDArray[Any], text: str) -> None:
    assert elements(datatype, array.tobytes()) == text


def test_strings_are_in_quotation_marks() -> None:
    data = b"\x02\0\0\0ab" + b"\0\0\0\0" + b"\x01\0\0\0\xff"
    assert elements("BYTES", data) == '"ab","","\\xff"'


def test_a_tensor_has_name_data_shape_and_datatype() -> None:
    tensor = Tensor("X", "INT32", [1, 2], np.array([3, 4], np.int32).tobytes())
    assert tensor_json(tensor) == {"name": "X", "data": "3,4", "shape": "1,2", "dtype": "INT32"}


class GoneMemory(SharedMemoryBytes):
    """Memory that its client has taken away."""

    def __len__(self) -> int:
        return 4

    def __bytes__(self) -> bytes:
        return self.read_part(0, 4)

    def read_part(self, begin: int, size: int) -> bytes:
        raise internal("shared memory region 'x' has become too small")


def test_elements_in_memory_of_a_client_that_is_gone_are_omitted() -> None:
    expected = {"name": "X", "data": "", "shape": "1", "dtype": "FP32"}
    assert tensor_json(Tensor("X", "FP32", [1], GoneMemory())) == expected

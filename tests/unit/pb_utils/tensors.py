"""Tensors of every data type, and tensors as a receiver gets them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pb_utils import Tensor

NUMERIC: dict[int, type[Any]] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Block:
    """Stands for a block of shared memory; tests check by a weak reference whether it is kept
    alive.
    """


def received(tensor: Tensor, owner: object = None) -> Tensor:
    """Returns the tensor as its receiver gets it."""
    data = memoryview(bytes(tensor._wire_data()))
    return Tensor._from_wire(tensor.name(), tensor._code, tensor.shape(), data, owner)


def wire_tensor(array: Any, name: str = "x", owner: object = None) -> Tensor:
    """Returns a received tensor with this content."""
    return received(Tensor(name, np.asarray(array)), owner)

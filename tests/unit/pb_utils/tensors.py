"""Tensors of every data type, and their way over a wire."""

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
    """Stands for a block of shared memory: tests ask whether somebody still holds it."""


def received(tensor: Tensor, owner: object = None) -> Tensor:
    """Return the tensor as its receiver sees it."""
    data = memoryview(bytes(tensor._wire_data()))
    return Tensor._from_wire(tensor.name(), tensor._code, tensor.shape(), data, owner)


def wire_tensor(array: Any, name: str = "x", owner: object = None) -> Tensor:
    """Return a tensor that was received with this content."""
    return received(Tensor(name, np.asarray(array)), owner)

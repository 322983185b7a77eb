"""Reads the output tensors of a model as texts and numbers."""

from __future__ import annotations

import numpy as np

from host.frontends.http.tensors import split_strings
from host.frontends.openai.errors import model_failure
from host.inference.request import Tensor, copy_from_shared_memory


def read_texts(tensor: Tensor) -> list[bytes]:
    """Returns the elements of a BYTES output. Raises OpenAIError for another datatype."""
    if tensor.datatype != "BYTES":
        raise model_failure(
            f"the model gave output '{tensor.name}' of {tensor.datatype}, expected BYTES"
        )
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    return [element for part in split_strings(data) for element in part]


def read_number(tensor: Tensor) -> int | None:
    """Returns the sum of an integer output; None if it is empty."""
    if tensor.datatype not in ("INT32", "INT64", "UINT32", "UINT64"):
        return None
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    values = np.frombuffer(data, tensor.datatype.lower())
    return int(values.sum()) if values.size else None


def read_float(tensor: Tensor) -> float | None:
    """Returns the first element of a floating-point output; None if it is empty."""
    if tensor.datatype not in ("FP32", "FP64"):
        return None
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    values = np.frombuffer(data, "<f4" if tensor.datatype == "FP32" else "<f8")
    return float(values[0]) if values.size else None

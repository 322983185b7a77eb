"""Compares the responses of two versions to the same request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from host.inference.request import InferResponse, Tensor
from host.inference.shared_memory_bytes import SharedMemoryBytes

_FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def are_equal(first: Sequence[InferResponse], second: Sequence[InferResponse]) -> bool:
    """Whether two versions gave the same responses, in the same order.

    Outputs are equal if datatype, shape and bytes are; numbers with a fraction may differ by a
    relative 1e-5 (`numpy.allclose`). Errors are equal if their codes are.
    """
    return len(first) == len(second) and all(map(_is_equal, first, second))


def response_bytes(response: InferResponse) -> int:
    """The bytes of all outputs."""
    return sum(len(_bytes(output) or b"") for output in response.outputs)


def _is_equal(first: InferResponse, second: InferResponse) -> bool:
    if first.error is not None or second.error is not None:
        codes = [None if one.error is None else one.error.code for one in (first, second)]
        return codes[0] is codes[1]
    outputs = {output.name: output for output in second.outputs}
    return len(first.outputs) == len(outputs) and all(
        output.name in outputs and _is_equal_tensor(output, outputs[output.name])
        for output in first.outputs
    )


def _is_equal_tensor(first: Tensor, second: Tensor) -> bool:
    if (first.datatype, list(first.shape)) != (second.datatype, list(second.shape)):
        return False
    ours, theirs = _bytes(first), _bytes(second)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    number = _FLOATS.get(first.datatype)
    if ours == theirs or number is None:
        return ours == theirs
    return np.allclose(np.frombuffer(ours, number), np.frombuffer(theirs, number), equal_nan=True)


def _bytes(tensor: Tensor) -> memoryview | None:
    """The bytes of a tensor; None if they are in memory of a client."""
    if isinstance(tensor.data, SharedMemoryBytes):
        return None
    return memoryview(tensor.data).cast("B")

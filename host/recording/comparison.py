"""Compares responses with recorded ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pb_utils import InferenceResponse, Tensor
from pb_utils._datatypes import BF16, NAMES


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Floats are equal if they differ by at most `absolute + relative * |recorded|`."""

    relative: float
    absolute: float


@dataclass(frozen=True, slots=True)
class ExpectedResponse:
    """A recorded response; outputs whose names are in `left_out` have no recorded content."""

    response: InferenceResponse
    left_out: Collection[str]


def describe_difference(
    recorded: Sequence[ExpectedResponse],
    received: Sequence[InferenceResponse],
    tolerance: Tolerance,
) -> str:
    """Returns the first difference of the responses to one request; "" if there is none.

    Errors are equal to errors whatever their texts, and parameters of responses are not compared.
    """
    for number, (expected, response) in enumerate(zip(recorded, received, strict=False), 1):
        if difference := _compare_responses(expected, response, tolerance):
            return f"response {number}: {difference}"
    if len(recorded) != len(received):
        return f"{len(received)} responses instead of {len(recorded)}"
    return ""


def _compare_responses(
    expected: ExpectedResponse, response: InferenceResponse, tolerance: Tolerance
) -> str:
    before, now = expected.response.error(), response.error()
    if before is not None and now is not None:
        return ""
    if now is not None:
        return f"error '{now.message()}' instead of outputs"
    if before is not None:
        return f"outputs instead of error '{before.message()}'"
    wanted = {tensor.name(): tensor for tensor in expected.response.output_tensors()}
    found = {tensor.name(): tensor for tensor in response.output_tensors()}
    names = {*wanted, *expected.left_out}
    if found.keys() != names:
        return f"outputs {sorted(found)} instead of {sorted(names)}"
    differences = (_compare_tensors(wanted[name], found[name], tolerance) for name in wanted)
    return next(filter(None, differences), "")


def _compare_tensors(expected: Tensor, tensor: Tensor, tolerance: Tolerance) -> str:
    shown, before = _describe_tensor(tensor), _describe_tensor(expected)
    if shown != before:
        return f"output {shown} instead of {before}"
    if expected._wire_data() == tensor._wire_data():
        return ""
    wanted, found = _to_array(expected), _to_array(tensor)
    if np.issubdtype(wanted.dtype, np.floating):
        wanted, found = wanted.astype(np.float64), found.astype(np.float64)
        equal = np.isclose(
            found, wanted, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True
        )
    else:
        equal = np.equal(wanted, found)
    count = int(equal.size - np.count_nonzero(equal))
    if not count:
        return ""
    first = tuple(int(index) for index in np.argwhere(~equal.astype(bool))[0])
    text = (
        f"output {shown}: {count} of {equal.size} elements differ, the first at {list(first)}:"
        f" {_show(found[first])} instead of {_show(wanted[first])}"
    )
    if wanted.dtype == np.float64:
        with np.errstate(invalid="ignore"):
            text += f"; the largest difference is {np.nanmax(np.abs(found - wanted)):g}"
    return text


def _describe_tensor(tensor: Tensor) -> str:
    return f"'{tensor.name()}' {NAMES[tensor.triton_dtype()]} {list(tensor.shape())}"


def _to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """The elements. numpy has no BF16: it is the upper half of a FP32."""
    if tensor.triton_dtype() == BF16:
        halves = np.frombuffer(tensor._wire_data(), np.dtype("<u2")).astype(np.uint32)
        floats: npt.NDArray[Any] = (halves << np.uint32(16)).view(np.float32)
        return floats.reshape(tensor.shape())
    array: npt.NDArray[Any] = tensor.as_numpy()
    return array


def _show(value: Any) -> str:
    """An element in few characters."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Inference within this process, with numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import pb_utils
from host.errors import invalid_argument
from host.inference.request import (
    InferRequest,
    InferResponse,
    Parameter,
    Result,
    Tensor,
    read_bytes,
)
from pb_utils._datatypes import CODES, NAMES

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays by input name. BYTES are object arrays of bytes or str."""


def to_request(
    model: str,
    inputs: Arrays,
    version: int,
    request_id: str,
    outputs: Sequence[str],
    parameters: Mapping[str, Parameter],
) -> InferRequest:
    """A request that uses the memory of the arrays. Raises HostError for unsupported arrays."""
    for text in (model, request_id, *outputs, *parameters):
        _check_text(text)
    for name, value in parameters.items():
        _check_parameter(name, value)
    return InferRequest(
        model_name=model,
        inputs=[_tensor(name, array) for name, array in inputs.items()],
        model_version=version,
        id=request_id,
        requested_outputs=list(outputs),
        parameters=dict(parameters),
    )


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise invalid_argument(f"expected a str, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_argument(f"{text!r} is not valid text: {error.reason}") from error


def _check_parameter(name: str, value: object) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif type(value) not in (bool, int, float):
        raise invalid_argument(
            f"invalid value type for '{name}' parameter, expected bool, int, float or str,"
            f" got {type(value).__name__}"
        )
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise invalid_argument(f"the value of parameter '{name}' does not fit 64 bits: {value}")


def _tensor(name: str, array: npt.NDArray[Any]) -> Tensor:
    _check_text(name)
    try:
        tensor = pb_utils.Tensor(name, np.asarray(array))
    except pb_utils.TritonModelException as error:
        raise invalid_argument(f"input '{name}': {error}") from error
    data = memoryview(tensor._wire_data())
    return Tensor(name, NAMES[tensor.triton_dtype()], tensor.shape(), data, tensor)


def to_result(response: InferResponse) -> Result:
    """Copies the outputs, so that the shared memory that they came in is free at once."""
    outputs = {}
    for output in response.outputs:
        data = memoryview(read_bytes(output.data))
        tensor = pb_utils.Tensor._from_wire(
            output.name, CODES[output.datatype], output.shape, data, output.owner
        )
        bf16 = output.datatype == "BF16"
        outputs[output.name] = tensor.as_bfloat16() if bf16 else tensor.as_numpy()
    return Result(
        response.model_name, response.model_version, response.id, outputs, response.parameters
    )

"""Asking a server inside this process: numpy arrays in and out, and a twin without `await`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import pb_utils
from host.errors import invalid_argument
from host.inference import InferRequest, InferResponse, Parameter, Tensor
from stub.wire.datatypes import CODES, NAMES

Arrays = Mapping[str, npt.NDArray[Any]]
"""Input name to array. BYTES are object arrays of bytes or str."""


@dataclass(frozen=True)
class Result:
    """What a model answered: outputs by name as private arrays, and the response's parameters."""

    model_name: str
    model_version: int
    id: str
    outputs: dict[str, npt.NDArray[Any]]
    parameters: dict[str, Parameter]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The output with this name. Raises KeyError."""
        return self.outputs[name]


def to_request(
    model: str,
    inputs: Arrays,
    version: int,
    request_id: str,
    outputs: Sequence[str],
    parameters: Mapping[str, Parameter],
) -> InferRequest:
    """A request over the arrays' own memory. Raises HostError for an array of no tensor type."""
    return InferRequest(
        model_name=model,
        inputs=[_tensor(name, array) for name, array in inputs.items()],
        model_version=version,
        id=request_id,
        requested_outputs=list(outputs),
        parameters=dict(parameters),
    )


def _tensor(name: str, array: npt.NDArray[Any]) -> Tensor:
    try:
        tensor = pb_utils.Tensor(name, np.asarray(array))
    except pb_utils.TritonModelException as error:
        raise invalid_argument(f"input '{name}': {error}") from error
    data = memoryview(tensor._wire_data())
    return Tensor(name, NAMES[tensor.triton_dtype()], tensor.shape(), data, tensor)


def to_result(response: InferResponse) -> Result:
    """Outputs as arrays of their own, so that the shared memory they came in is free at once."""
    outputs = {}
    for output in response.outputs:
        tensor = pb_utils.Tensor._from_wire(
            output.name, CODES[output.datatype], output.shape, memoryview(output.data), output.owner
        )
        bf16 = output.datatype == "BF16"
        outputs[output.name] = tensor.as_bfloat16() if bf16 else tensor.as_numpy()
    return Result(
        response.model_name, response.model_version, response.id, outputs, response.parameters
    )

"""Requests and responses on their way between a test, a model and the models it asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pb_utils._datatypes import BF16
from pb_utils._errors import TritonError
from pb_utils._model_exception import TritonModelException
from pb_utils._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, InferenceRequest
from pb_utils._response import InferenceResponse
from pb_utils._tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt


class Incoming(NamedTuple):
    """What a harness knows about a request that comes in: its handle."""

    cancelled: bool = False


def as_tensors(arrays: Mapping[str, npt.ArrayLike | Tensor]) -> list[Tensor]:
    """Return tensors of arrays, or of what numpy makes an array of; text becomes BYTES."""
    tensors = []
    for name, value in arrays.items():
        if isinstance(value, Tensor):
            tensors.append(value)
            continue
        array = np.asarray(value)
        tensors.append(Tensor(name, array.astype(np.object_) if array.dtype.kind == "U" else array))
    return tensors


def as_arrays(response: InferenceResponse) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs by name.

    Raises:
        TritonModelException: the response carries an error, whose text this one has.
    """
    error = response.error()
    if error is not None:
        raise TritonModelException(error.message())
    return {
        tensor.name(): tensor.as_bfloat16() if tensor.triton_dtype() == BF16 else tensor.as_numpy()
        for tensor in response.output_tensors()
    }


def incoming(request: InferenceRequest, outputs: Iterable[str]) -> InferenceRequest:
    """Return the request as its model receives it; ``outputs`` are meant if it names none."""
    return InferenceRequest._from_wire(
        request_id=request._request_id,
        correlation_id=request._correlation_id,
        inputs=[_sent(tensor) for tensor in request._inputs],
        requested_output_names=list(request._requested_output_names) or list(outputs),
        model_name=request._model_name,
        model_version=request._model_version,
        flags=request._flags,
        timeout=request._timeout,
        parameters=dict(request._parameters),
        trace=request._trace,
        handle=request._handle or Incoming(),
    )


def answered(response: InferenceResponse, request: InferenceRequest) -> InferenceResponse:
    """Return the response as the sender of the request receives it, less what it did not want."""
    if response._error is not None:
        return InferenceResponse._from_wire([], response._error, None)
    wanted = request.requested_output_names()
    tensors = [t for t in response._output_tensors if not wanted or t._name in wanted]
    return InferenceResponse._from_wire(
        [_sent(tensor) for tensor in tensors], None, response._parameters
    )


def failed(message: str) -> InferenceResponse:
    """Return a response to a request that could not be served."""
    return InferenceResponse._from_wire([], TritonError(message), None)


def checked(returned: Any, requests: list[InferenceRequest]) -> list[InferenceResponse]:
    """Return what ``execute`` returned if a server would accept it.

    Raises:
        TritonModelException: it would not, or a request is left without an answer.
    """
    if returned is None:
        returned = [None] * len(requests)
    elif not isinstance(returned, list):
        raise TritonModelException(
            f"Expected a list in the execute return, found type '{type(returned)}'."
        )
    if len(returned) != len(requests):
        raise TritonModelException(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size "
            f"is:{len(returned)}\n"
        )
    responses: list[InferenceResponse] = []
    for index, (request, response) in enumerate(zip(requests, returned)):
        rescheduled = request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        if rescheduled and response is not None:
            raise TritonModelException(
                "Expected a None object in the execute function return list for reschduled "
                f"request, found type '{type(response)}'."
            )
        if response is None:
            raise TritonModelException(f"The request at index {index} was left without an answer.")
        if not isinstance(response, InferenceResponse):
            raise TritonModelException(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
        responses.append(response)
    return responses


def _sent(tensor: Tensor) -> Tensor:
    """Return a tensor as it arrives; what was captured now is what later sends carry."""
    data = memoryview(bytes(tensor._wire_data()))
    tensor._adopt(data, None)
    return Tensor._from_wire(tensor._name, tensor._code, tensor._shape, data, None)

"""Requests and responses on their way between a test, a model and the models it asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pb_utils._datatypes import BF16
from pb_utils._errors import TritonError
from pb_utils._model_exception import TritonModelException
from pb_utils._request import InferenceRequest
from pb_utils._request_fields import RequestFields
from pb_utils._response import InferenceResponse
from pb_utils._sender import Responder
from pb_utils._tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._runtime import ResponseReceiver
    from pb_utils._stream import ResponseStream


def error_response(message: str) -> InferenceResponse:
    """Return a response to a request that could not be served."""
    return InferenceResponse._from_wire([], TritonError(message), None)


class NoResponse(InferenceResponse):
    """What the sender of a request gets in place of an answer that the model does not give."""

    __slots__ = ()


class PendingRequest(Responder):
    """One request that a model in a harness has to answer, and who gets its responses.

    ``cancelled`` is set by whoever sent the request. A request that nobody can answer any more is
    answered by ``NoResponse``, whose text begins with ``subject``.
    """

    __slots__ = ("_held_response", "_receive", "_requested_outputs", "cancelled", "subject")

    def __init__(
        self,
        decoupled: bool,
        receive: ResponseReceiver,
        cancelled: threading.Event,
        wanted: Iterable[str] = (),
        subject: str = "The request",
    ) -> None:
        """Begin; the responses have only the ``wanted`` outputs, all if there are none."""
        super().__init__(decoupled)
        self.cancelled = cancelled
        self.subject = subject
        self._receive = receive
        self._requested_outputs = frozenset(wanted)
        self._held_response: InferenceResponse | None = None

    def is_cancelled(self) -> bool:
        """Return whether the sender of the request has cancelled it."""
        return self.cancelled.is_set()

    def fail(self, message: str) -> None:
        """Answer with an error as the last response, unless the last one has been sent."""
        if self.close():
            self._receive(error_response(message), True)

    def _wait_for_credit(self) -> None:
        pass  # the sender of the request takes all that comes

    def _send_response(self, response: InferenceResponse | None, final: bool) -> None:
        sent = None if response is None else response_as_received(response, self._requested_outputs)
        if self.decoupled:
            self._receive(sent, final)
        elif final:
            self._receive(sent or self._held_response, True)
        else:
            self._held_response = sent  # one message is all that the caller gets, when all is over

    def __del__(self) -> None:
        """Tell the caller that no answer will come."""
        if not self.closed:
            lacks = "was left without an answer."
            if self.has_response:
                lacks = (
                    "was answered without TRITONSERVER_RESPONSE_COMPLETE_FINAL, so that it never "
                    "ends."
                )
            error = TritonError(f"{self.subject} {lacks}")
            self._receive(NoResponse._from_wire([], error, None), True)


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


def error_text(response: InferenceResponse) -> str:
    """Return the text of a response's error."""
    return "" if response._error is None else response._error.message()


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


def request_as_received(
    request: RequestFields, pending_request: PendingRequest, outputs: Iterable[str]
) -> InferenceRequest:
    """Return the request as its model receives it; ``outputs`` are meant if it names none."""
    return InferenceRequest._from_wire(
        request_id=request._request_id,
        correlation_id=request._correlation_id,
        inputs=[_tensor_as_received(tensor) for tensor in request._inputs],
        requested_output_names=list(request._requested_output_names) or list(outputs),
        model_name=request._model_name,
        model_version=request._model_version,
        flags=request._flags,
        timeout=request._timeout,
        parameters=dict(request._parameters),
        trace=request._trace,
        handle=pending_request,
    )


def response_as_received(response: InferenceResponse, wanted: Iterable[str]) -> InferenceResponse:
    """Return the response as the sender of the request receives it, less what it did not want."""
    if response._error is not None:
        return InferenceResponse._from_wire([], response._error, None)
    names = frozenset(wanted)
    tensors = [t for t in response._output_tensors if not names or t._name in names]
    return InferenceResponse._from_wire(
        [_tensor_as_received(tensor) for tensor in tensors], None, response._parameters
    )


def cancelled_event(request: InferenceRequest) -> threading.Event:
    """Return what is set when the sender of the request cancels it."""
    pending_request = request._handle
    return (
        pending_request.cancelled
        if isinstance(pending_request, PendingRequest)
        else threading.Event()
    )


def receiver_of(stream: ResponseStream) -> Callable[[InferenceResponse | None, bool], None]:
    """Return what puts responses into a stream; an end alone is no response for a client."""

    def receive(response: InferenceResponse | None, final: bool) -> None:
        if response is None:
            stream.put_end()
        else:
            stream.put_response(response, final)

    return receive


def discard_response(response: InferenceResponse | None, final: bool) -> None:
    """Take a response in which nobody is interested."""


def _tensor_as_received(tensor: Tensor) -> Tensor:
    """Return a tensor as it arrives; what was captured now is what later sends carry."""
    data = memoryview(bytes(tensor._wire_data()))
    tensor._set_wire_data(data, None)
    return Tensor._from_wire(tensor._name, tensor._code, tensor._shape, data, None)

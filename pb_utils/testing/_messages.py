"""Requests and responses between a test, the model under test and stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pb_utils._datatypes import BF16
from pb_utils._exceptions import TritonModelException
from pb_utils._request import InferenceRequest
from pb_utils._request_fields import RequestFields
from pb_utils._response import InferenceResponse, Responder, TritonError
from pb_utils._tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._bls import ResponseStream
    from pb_utils._runtime import ResponseReceiver


def error_response(message: str) -> InferenceResponse:
    """Creates the response to a request that failed."""
    return InferenceResponse._from_wire([], TritonError(message), None)


class NoResponse(InferenceResponse):
    """The error response of the harness to a request that the model did not complete."""

    __slots__ = ()


class PendingRequest(Responder):
    """A request that the model under test has to answer.

    If the request and its sender are deleted before the final response, the request ends with
    ``NoResponse``. ``subject`` is the beginning of its text.

    Attributes:
        cancelled: the event that is set when the caller cancels the request.
        subject: the name of the request in error texts.
    """

    __slots__ = (
        "_find_fault",
        "_held_response",
        "_receive",
        "_requested_outputs",
        "cancelled",
        "subject",
    )

    def __init__(
        self,
        decoupled: bool,
        receive: ResponseReceiver,
        cancelled: threading.Event,
        requested_outputs: Iterable[str] = (),
        subject: str = "The request",
        find_fault: Callable[[InferenceResponse], str | None] = lambda response: None,
    ) -> None:
        """Creates the pending request.

        Args:
            decoupled: whether the model may send any number of responses.
            receive: gets the responses.
            cancelled: the event that the caller sets to cancel the request.
            requested_outputs: names of the outputs to deliver; all outputs if empty.
            subject: the name of the request in error texts.
            find_fault: returns the error that replaces a response, if it has one.
        """
        super().__init__(decoupled)
        self.cancelled = cancelled
        self.subject = subject
        self._receive = receive
        self._requested_outputs = frozenset(requested_outputs)
        self._held_response: InferenceResponse | None = None
        self._find_fault = find_fault

    def is_cancelled(self) -> bool:
        """Returns whether the caller has cancelled the request."""
        return self.cancelled.is_set()

    def fail(self, message: str) -> None:
        """Sends an error as the last response, unless the request is complete."""
        if self.close():
            self._receive(error_response(message), True)

    def _wait_for_credit(self) -> None:
        pass  # no flow control: the receiver takes every response at once

    def _wake_senders(self) -> None:
        pass  # none waits

    def _send_response(self, response: InferenceResponse | None, final: bool) -> None:
        sent = None
        if response is not None:
            fault = self._find_fault(response)
            sent = (
                error_response(fault)
                if fault is not None
                else response_as_received(response, self._requested_outputs)
            )
        if self.decoupled:
            self._receive(sent, final)
        elif final:
            self._receive(sent or self._held_response, True)
        else:
            # As in a server, the response is delivered when the request is complete.
            self._held_response = sent

    def __del__(self) -> None:
        """Ends the request with an error if the model has dropped it."""
        if not self.closed:
            problem = "got no response."
            if self.has_response:
                problem = (
                    "got a response without TRITONSERVER_RESPONSE_COMPLETE_FINAL and never "
                    "completes."
                )
            error = TritonError(f"{self.subject} {problem}")
            self._receive(NoResponse._from_wire([], error, None), True)


def as_tensors(arrays: Mapping[str, npt.ArrayLike | Tensor]) -> list[Tensor]:
    """Creates tensors from arrays, or from values that numpy converts; str becomes BYTES."""
    tensors = []
    for name, value in arrays.items():
        if isinstance(value, Tensor):
            tensors.append(value)
            continue
        array = np.asarray(value)
        tensors.append(Tensor(name, array.astype(np.object_) if array.dtype.kind == "U" else array))
    return tensors


def error_text(response: InferenceResponse) -> str:
    """Returns the text of an error response; ``""`` without an error."""
    return "" if response._error is None else response._error.message()


def as_arrays(response: InferenceResponse) -> dict[str, npt.NDArray[Any]]:
    """Returns the outputs of a response by name.

    Raises:
        TritonModelException: the response is an error, whose text it has.
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
    """Returns the request as its model receives it: with copies of its tensors.

    Args:
        request: the sent request.
        pending_request: the responder of the received request.
        outputs: names of the outputs that are requested if the request names none.
    """
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


def response_as_received(
    response: InferenceResponse, requested_outputs: Iterable[str]
) -> InferenceResponse:
    """Returns the response as its caller receives it: with copies of the requested outputs only."""
    if response._error is not None:
        return InferenceResponse._from_wire([], response._error, None)
    names = frozenset(requested_outputs)
    tensors = [t for t in response._output_tensors if not names or t._name in names]
    return InferenceResponse._from_wire(
        [_tensor_as_received(tensor) for tensor in tensors], None, response._parameters
    )


def cancelled_event(request: InferenceRequest) -> threading.Event:
    """Returns the event that is set when the caller cancels the request."""
    pending_request = request._handle
    return (
        pending_request.cancelled
        if isinstance(pending_request, PendingRequest)
        else threading.Event()
    )


def stream_receiver(stream: ResponseStream) -> Callable[[InferenceResponse | None, bool], None]:
    """Returns a receiver that adds responses to a stream. A final flag alone adds no response."""

    def receive(response: InferenceResponse | None, final: bool) -> None:
        if response is None:
            stream.put_end()
        else:
            stream.put_response(response, final)

    return receive


def discard_response(response: InferenceResponse | None, final: bool) -> None:
    """Drops a response."""


def _tensor_as_received(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor as its receiver gets it. Later sends repeat the same content."""
    data = memoryview(bytes(tensor._wire_data()))
    tensor._set_wire_data(data, None)
    return Tensor._from_wire(tensor._name, tensor._code, tensor._shape, data, None)

"""What travels through the host: tensors, a request, its responses, and the call between."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from host.errors import ErrorCode, HostError
from host.inference.shared_memory_bytes import SharedMemoryBytes, refuse_if_too_large
from stub.wire.payload import TraceLink

Parameter = bool | int | float | str
"""Value of a request or response parameter, as every door accepts it (protocol 2.2)."""

Buffer = bytes | memoryview
"""Tensor bytes: little-endian, row-major, unpadded; BYTES elements are length-prefixed."""


class Tensor(msgspec.Struct):
    """A named array on its way: `data` holds its bytes, `owner` whatever keeps them valid.

    `datatype` is the wire name (`FP32`, `BYTES`, ...; protocol 0.2). An output that lies where its
    client wants it has no `data`.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Buffer | SharedMemoryBytes
    owner: object = None


def copy_from_shared_memory(tensor: Tensor) -> Tensor:
    """The tensor out of the reach of clients.

    Raises HostError INTERNAL if its bytes are gone, INVALID_ARG if they are too many.
    """
    if not isinstance(tensor.data, SharedMemoryBytes):
        return tensor
    refuse_if_too_large(tensor.name, tensor.data)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))


@dataclass(slots=True)
class Classification:
    """Which outputs are answered by their best classes instead, and how many of each (spec 1.11).

    The core adds what the model says about them: the names of classes by output, and whether it
    batches.
    """

    counts: dict[str, int]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    batched: bool = False


class RequestTrace(Protocol):
    """The trace that a request is part of, as those see it who have the request on its way."""

    @property
    def trace_id(self) -> str:
        """Its id, as it is looked for."""

    @property
    def includes_tensors(self) -> bool:
        """Whether the content of tensors is part of it."""

    def create_child(self) -> RequestTrace:
        """The trace of a request that is made on behalf of this one."""

    def record_event(self, name: str, ns: int = 0) -> None:
        """Something happens at the door, now unless another time is given."""

    def finish_response(self) -> None:
        """The door has nothing more to do. A second call does nothing."""

    def start_inference(self, request: InferRequest, model: str, version: int, ns: int) -> None:
        """The model takes the request, which was received at this time."""

    def reject_inference(self) -> None:
        """It does not take it after all."""

    def start_compute(self) -> TraceLink:
        """The request goes to an instance: what that may know. `finish_compute` follows."""

    def finish_compute(self, times: ExecutionTimes | None) -> None:
        """Its batch has ended; without times, because the stub died."""

    def record_response(self, response: InferResponse | None, final: bool) -> None:
        """A response is there, or with None only the end."""


class RequestTracer(Protocol):
    """Decides which requests are traced."""

    def start_trace(self, model: str, header: Callable[[str], str | None]) -> RequestTrace | None:
        """The trace of a request to a model, open at its door; None if it is not to be traced.

        `header` gives the value of a header that the client sent, by its lowercase name.
        """


class ExecutionTimes(msgspec.Struct):
    """When a batch got how far: CLOCK_MONOTONIC nanoseconds."""

    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int


class InferRequest(msgspec.Struct):
    """One inference request, as any door hands it to the core.

    `model_version` -1 means "the latest ready one"; `requested_outputs` empty means "all";
    `timeout_us` is in microseconds, 0 for none; `flags` are sequence start 1 and end 2.
    """

    model_name: str
    inputs: list[Tensor]
    model_version: int = -1
    id: str = ""
    requested_outputs: list[str] = msgspec.field(default_factory=list)
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    trace: RequestTrace | None = None
    output_placement: dict[str, object] | None = None
    """Outputs by name that are to be written to the client's memory, and where: blocks."""
    output_placement_hints: dict[str, object] | None = None
    """Outputs by name that may as well be made in a client's memory, and where: blocks."""
    classification: Classification | None = None
    max_outstanding_responses: int = 0
    """Responses that may be under way at a time, which nobody has taken; 0: as many as usual."""
    validation_key: object = None
    """What it shares with every request that differs from it in nothing but its id and the content
    of its tensors, whose sizes are equal too; None if nobody knows of any."""
    batch_size: int = 1  # filled by validation: first dimension of the inputs of a batching model


class InferResponse(msgspec.Struct):
    """One answer. With an `error` there are no outputs."""

    model_name: str
    model_version: int
    id: str = ""
    outputs: list[Tensor] = msgspec.field(default_factory=list)
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    error: HostError | None = None


class FailureReason(enum.Enum):
    """Why a request failed that had been accepted, as metrics tell it (protocol spec 6)."""

    REJECTED = "REJECTED"  # its time in the queue was over
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # in the model, or reported by it
    OTHER = "OTHER"


ResponseCallback = Callable[[InferResponse | None, bool], None]
"""Called with (response or None for a bare completion, is it the last one)."""


CancelCallback = Callable[["Call"], bool | None]
"""Called when the asker of a call has gone: whether a model has the call, and may still respond."""


ComputeCallback = Callable[[int, int, int], None]
"""Called with the nanoseconds that an execution has spent on inputs, on inference, on outputs."""


class Call:
    """One request on its way: a model responds to it, a door awaits, iterates or subscribes.

    All methods belong to the event loop's thread. Whoever serves the call may set `on_cancel`.
    """

    __slots__ = (
        "request",
        "received_ns",
        "queued_ns",
        "finished",
        "failed",
        "cancelled",
        "cancellation_error",
        "failure_reason",
        "on_cancel",
        "on_computed",
        "on_first_response",
        "on_finish",
        "on_response",
        "on_response_acknowledged",
        "holder",
        "_callback",
        "_responses",
        "_waiter",
    )

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.received_ns = time.monotonic_ns()
        self.queued_ns = 0
        self.finished = False
        self.failed = False  # it ended, or will end, with an error
        self.cancelled = False
        self.cancellation_error: HostError | None = (
            None  # what it ends with if its model does not begin
        )
        self.failure_reason: FailureReason | None = (
            None  # if it is known to be neither BACKEND nor OTHER
        )
        self.on_cancel: CancelCallback | None = None
        self.on_computed: ComputeCallback | None = None  # may come after its last response
        self.on_first_response: Callable[[Call], None] | None = None  # its first response is there
        self.on_finish: Callable[[Call], None] | None = None
        self.on_response: Callable[[InferResponse], None] | None = None  # may change it
        self.on_response_acknowledged: Callable[[InferResponse], None] | None = None
        self.holder: object = None  # the scheduler it waits in, or the lane it runs on
        self._callback: ResponseCallback | None = None
        self._responses: deque[tuple[InferResponse | None, bool]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Pass one response on. `final` ends the call; what comes after that is dropped."""
        if self.finished:
            return
        if response is not None and response.error is not None:
            self.failed = True
        if self.on_response is not None and response is not None:
            self.on_response(response)
        if self.request.trace is not None:
            self.request.trace.record_response(response, final)
        if self.on_first_response is not None and response is not None:
            told, self.on_first_response = self.on_first_response, None
            told(self)
        if final:
            self.finished = True
            # An error's traceback may keep the request alive until the next collection; what
            # it occupies in shared memory is not to wait for that.
            self.request.inputs = []
            self.request.output_placement = self.request.output_placement_hints = None
            if self.on_finish is not None:
                self.on_finish(self)
        callback = self._callback
        if callback is not None:
            if final:
                self._callback = None  # it refers to this call: no collection should be needed
            callback(response, final)
            return
        self._responses.append((response, final))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def record_compute_times(self, times: ExecutionTimes | None) -> None:
        """Its batch has ended; without times, because the stub died."""
        if self.request.trace is not None:
            self.request.trace.finish_compute(times)
        if self.on_computed is not None and times is not None:
            self.on_computed(
                times.inputs_ready - times.started,
                times.outputs_begin - times.inputs_ready,
                times.ended - times.outputs_begin,
            )

    def prepare_response(self, response: InferResponse) -> None:
        """The model has made a response, which is going to be passed on; it may be changed."""

    def try_reschedule(self) -> bool:
        """The model wants to have the request once more; whether it will."""
        return False

    def acknowledge_response(self, response: InferResponse) -> None:
        """The asker is done with a response that was not the last one: the next may come."""
        if self.on_response_acknowledged is not None and not self.finished:
            self.on_response_acknowledged(response)

    def fail(self, error: HostError) -> None:
        """End the call with an error response."""
        request = self.request
        self.respond(
            InferResponse(request.model_name, request.model_version, request.id, error=error)
        )

    def cancel(self) -> None:
        """The asker has lost interest: tell whoever serves the call, and end it."""
        self.abort(HostError(ErrorCode.CANCELLED, ""))

    def abort(self, error: HostError) -> None:
        """Take the call away from whoever serves it, and end it with this error."""
        if self.finished or self.cancelled:
            return
        self.cancelled = True
        if error.code is ErrorCode.CANCELLED:
            self.failure_reason = FailureReason.CANCELED
        if self.on_cancel is not None:
            self.on_cancel(self)
        self.fail(error)

    def request_cancellation(self, error: HostError) -> None:
        """The asker needs no more. A model that has the call is told, and what it still responds
        arrives; a call that no model has ends with this error.
        """
        if self.finished or self.cancelled or self.cancellation_error is not None:
            return
        self.cancellation_error = error
        if self.on_cancel is None or not self.on_cancel(self):
            self.on_cancel = None
            self.abort(error)

    def subscribe(self, callback: ResponseCallback) -> None:
        """Deliver responses to `callback` as they come, starting with those already here."""
        while self._responses:
            callback(*self._responses.popleft())
        if not self.finished:
            self._callback = callback

    def subscribe_single(self, callback: Callable[[InferResponse | HostError], None]) -> None:
        """Deliver the only response of a unary call, once: or its error, or INTERNAL if there was
        none or several; then the call is cancelled.
        """
        told = False

        def deliver(response: InferResponse | None, final: bool) -> None:
            nonlocal told
            if told:
                return
            told = True
            if not final:
                self.cancel()
            callback(_single_result(response, final))

        self.subscribe(deliver)

    async def _next(self) -> tuple[InferResponse | None, bool]:
        while not self._responses:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        response, final = self._responses.popleft()
        if response is not None:
            self.acknowledge_response(response)
        return response, final

    def __await__(self) -> Generator[object, None, InferResponse]:
        return self._single().__await__()

    async def _single(self) -> InferResponse:
        """The only response of a unary call.

        Raises HostError with the response's own error, or INTERNAL if there was none or several.
        A caller that is cancelled while waiting cancels the call.
        """
        try:
            response, final = await self._next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not final:
            self.cancel()
        answer = _single_result(response, final)
        if isinstance(answer, HostError):
            raise answer
        return answer

    async def __aiter__(self) -> AsyncGenerator[InferResponse, None]:
        """Every response in order; ends with the final one. Leaving early cancels the call."""
        final = False
        try:
            while not final:
                response, final = await self._next()
                if response is not None:
                    yield response
        finally:
            if not final:
                self.cancel()


def _single_result(response: InferResponse | None, final: bool) -> InferResponse | HostError:
    """What the first thing that comes of a unary call is to its asker."""
    if response is not None and response.error is not None:
        return response.error
    if response is None or not final:
        count = 0 if response is None else 2
        return HostError(ErrorCode.INTERNAL, f"expected a single response, got {count}")
    return response

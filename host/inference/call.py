"""The call: one request in progress, between its caller, its model and its holder."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from host.errors import ErrorCode, HostError
from host.inference.request import ExecutionTimes, InferRequest, InferResponse


class FailureReason(enum.Enum):
    """Why an accepted request failed, as in the metrics.

    Source: docs/reference/protocol.md, 6.
    """

    REJECTED = "REJECTED"  # its time in the queue was over
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # in the model, or reported by it
    OTHER = "OTHER"


ResponseCallback = Callable[[InferResponse | None, bool], None]
"""Called with a response (None for an end without one), and whether it is the last one."""


CancelCallback = Callable[["Call"], bool | None]
"""Called when the caller has gone; returns whether the model may still respond."""


ComputeCallback = Callable[[int, int, int], None]
"""Called with nanoseconds that an execution spent on inputs, inference and outputs."""


def _never() -> bool:
    return False


class CallHolder:
    """Base of what has calls in progress: a queue, an instance, the execution of an ensemble.

    It tells the deadlock detector what its calls wait for; by default, for nothing.
    """

    __slots__ = ()

    instances: Sequence[CallHolder] | None = None
    """Of a queue, the instances that will run its calls; None for a holder that is no queue."""

    may_recover: Callable[[], bool] = staticmethod(_never)
    """Of a queue, whether an instance that was removed is being replaced."""

    @property
    def blocking_calls(self) -> Sequence[Call]:
        """The calls that must end before its calls can go on."""
        return ()

    @property
    def potentially_blocking_calls(self) -> Sequence[Sequence[Call]]:
        """For each batch in progress, the calls that it has made without waiting for them yet.

        One of these batches must end before the instance is free; empty if it is free.
        """
        return ()

    @property
    def resource_holders(self) -> Sequence[CallHolder]:
        """The instances that hold the resources that this one needs before it can run anything."""
        return ()


class Call:
    """One request in progress. A model responds; a frontend awaits, iterates or subscribes.

    All methods belong to the event loop's thread. The owner of the call may set `on_cancel`.
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
            None  # the error to end with if the model does not start it
        )
        self.failure_reason: FailureReason | None = None  # set if it is neither BACKEND nor OTHER
        self.on_cancel: CancelCallback | None = None
        self.on_computed: ComputeCallback | None = None  # may be called after the last response
        self.on_first_response: Callable[[Call], None] | None = (
            None  # called with the first response
        )
        self.on_finish: Callable[[Call], None] | None = None
        self.on_response: Callable[[InferResponse], None] | None = None  # may change the response
        self.on_response_acknowledged: Callable[[InferResponse], None] | None = None
        self.holder: CallHolder | None = (
            None  # the scheduler that queues it, or the instance that runs it
        )
        self._callback: ResponseCallback | None = None
        self._responses: deque[tuple[InferResponse | None, bool]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Passes a response on. `final` ends the call; later responses are dropped."""
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
            # The traceback of an error may keep the request alive until the next garbage
            # collection. Its shared memory must not wait for that.
            self.request.inputs = []
            self.request.output_placement = self.request.output_placement_hints = None
            if self.on_finish is not None:
                self.on_finish(self)
        callback = self._callback
        if callback is not None:
            if final:
                self._callback = None  # breaks a reference cycle
            callback(response, final)
            return
        self._responses.append((response, final))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def record_compute_times(self, times: ExecutionTimes | None) -> None:
        """Records the end of the batch; `times` is None if the stub died."""
        if self.request.trace is not None:
            self.request.trace.finish_compute(times)
        if self.on_computed is not None and times is not None:
            self.on_computed(
                times.inputs_ready - times.started,
                times.outputs_begin - times.inputs_ready,
                times.ended - times.outputs_begin,
            )

    def prepare_response(self, response: InferResponse) -> None:
        """Called before a response is passed on; may change it."""

    def try_reschedule(self) -> bool:
        """Called when the model asks to get the request again; returns whether it will."""
        return False

    def acknowledge_response(self, response: InferResponse) -> None:
        """Called when the caller has processed a response; the model may send the next one."""
        if self.on_response_acknowledged is not None and not self.finished:
            self.on_response_acknowledged(response)

    def fail(self, error: HostError) -> None:
        """Ends the call with an error response."""
        request = self.request
        self.respond(
            InferResponse(request.model_name, request.model_version, request.id, error=error)
        )

    def cancel(self) -> None:
        """Cancels the call, as the caller has gone."""
        self.abort(HostError(ErrorCode.CANCELLED, ""))

    def abort(self, error: HostError) -> None:
        """Withdraws the call from its owner and ends it with this error."""
        if self.finished or self.cancelled:
            return
        self.cancelled = True
        if error.code is ErrorCode.CANCELLED:
            self.failure_reason = FailureReason.CANCELED
        if self.on_cancel is not None:
            self.on_cancel(self)
        self.fail(error)

    def request_cancellation(self, error: HostError) -> None:
        """Asks the model to stop.

        A model that has the request is told, and its further responses are passed on. A call that
        no model has ends with this error.
        """
        if self.finished or self.cancelled or self.cancellation_error is not None:
            return
        self.cancellation_error = error
        if self.on_cancel is None or not self.on_cancel(self):
            self.on_cancel = None
            self.abort(error)

    def subscribe(self, callback: ResponseCallback) -> None:
        """Calls `callback` with each response, starting with those that are already here."""
        while self._responses:
            callback(*self._responses.popleft())
        if not self.finished:
            self._callback = callback

    def subscribe_single(self, callback: Callable[[InferResponse | HostError], None]) -> None:
        """Calls `callback` once, with the only response of a unary call or with its error.

        The error is INTERNAL if there was no response, or several; the call is cancelled then.
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

        Raises HostError with the response's own error, or INTERNAL if there was none or several. A
        caller that is cancelled while it waits cancels the call.
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
        """Every response in order, including the final one. Leaving early cancels the call."""
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
    """The result of a unary call, from what came first."""
    if response is not None and response.error is not None:
        return response.error
    if response is None or not final:
        count = 0 if response is None else 2
        return HostError(ErrorCode.INTERNAL, f"expected a single response, got {count}")
    return response

"""The call: one request in progress, between its caller, its model and its holder; and batches."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Sequence
from typing import Protocol

import msgspec

from host.errors import ErrorCode, HostError, unexpected_failure
from host.inference.request import ExecutionTimes, InferRequest, InferResponse

_log = logging.getLogger("pbhost")


class FailureReason(enum.Enum):
    """Why an accepted request failed, as in the metrics.

    Source: docs/reference/metrics.md, "Metrics".
    """

    REJECTED = "REJECTED"  # its time in the queue was over
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # in the model, or reported by it
    OTHER = "OTHER"


ResponseCallback = Callable[[InferResponse | None, bool], None]
"""Called with a response (None for an end without one), and whether it is the last one."""


ResultCallback = Callable[[InferResponse | HostError], None]
"""Called with the only response of a unary call, or with its error."""


ComputeCallback = Callable[[int, int, int], None]
"""Called with nanoseconds that an execution spent on inputs, inference and outputs."""


class CallState(enum.Enum):
    """The progress of a call."""

    RUNNING = "running"  # queued, or with a model
    CANCELLING = "cancelling"  # its model was asked to stop, and may still respond
    ABORTED = "aborted"  # withdrawn from its holder; its error response follows at once
    FINISHED = "finished"  # its last response was passed on


_RUNNING, _CANCELLING = CallState.RUNNING, CallState.CANCELLING
_ABORTED, _FINISHED = CallState.ABORTED, CallState.FINISHED


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

    def cancel_call(self, call: Call) -> bool:
        """Withdraws a call that it holds, as no response is wanted any more.

        Returns whether a model has the call and may still respond.
        """
        return False

    @property
    def blocking_calls(self) -> Sequence[Call]:
        """The calls that must end before its calls can continue."""
        return ()

    @property
    def awaited_models(self) -> Collection[str]:
        """The models that must be loaded before its calls can continue."""
        return ()

    @property
    def potentially_blocking_calls(self) -> Sequence[Sequence[Call]]:
        """For each batch in progress, the calls that it has made without waiting for them yet.

        One of these batches must end before the instance is free; empty if it is free.
        """
        return ()

    def overtake(self) -> bool:
        """Runs something before its turn, which would never come; whether that was possible."""
        return False

    @property
    def resource_holders(self) -> Sequence[CallHolder]:
        """The instances that hold the resources that this one needs before it can run anything."""
        return ()


class CallListener(Protocol):
    """What a model learns about its calls.

    Attributes:
        observes_responses: Whether `call_responded` does anything.
    """

    observes_responses: bool

    def call_responded(self, call: Call, response: InferResponse) -> None:
        """Called before a response is passed on; may change it."""

    def call_finished(self, call: Call) -> None:
        """Called once, before the last response is passed on."""


class Call(msgspec.Struct, eq=False):
    """One request in progress. A model responds; a caller awaits, iterates or subscribes.

    `listener` is the model. `holder` is the queue or the instance that has the call now. All
    methods belong to the event loop's thread.
    """

    refused = False
    """Whether it never started: its only response has the error that refused it. Only calls of a
    frontend process are; elsewhere, such an error is raised."""

    prepares_responses = False
    """Whether `prepare_response` does anything."""

    request: InferRequest
    received_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    queued_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    state: CallState = _RUNNING
    failed: bool = False
    """Whether it ended, or will end, with an error."""
    responded: bool = False
    """Whether a response was passed on."""
    cancellation_error: HostError | None = None
    """Ends a call that no model starts."""
    failure_reason: FailureReason | None = None
    """Set if it is neither BACKEND nor OTHER."""
    holder: CallHolder | None = None
    listener: CallListener | None = None
    on_computed: ComputeCallback | None = None
    """May be called after the last response."""
    on_response_acknowledged: Callable[[InferResponse], None] | None = None
    _callback: ResponseCallback | None = None
    _on_result: ResultCallback | None = None  # in its place, for a unary call
    _responses: deque[tuple[InferResponse | None, bool]] | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the last response was passed on."""
        return self.state is _FINISHED

    @property
    def ended(self) -> bool:
        """Whether the call is finished, or is being aborted: nothing has to run for it."""
        state = self.state
        return state is _FINISHED or state is _ABORTED

    @property
    def cancelled(self) -> bool:
        """Whether it was ended because no response is wanted any more."""
        return self.failure_reason is FailureReason.CANCELED

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Passes a response on. `final` ends the call; later responses are dropped.

        If the listener or the caller raises an exception, it is logged, and the call ends with an
        INTERNAL error.
        """
        if self.state is _FINISHED:
            return
        try:
            listener = self.listener
            if response is not None:
                if response.error is not None:
                    self.failed = True
                if listener is not None and listener.observes_responses:
                    listener.call_responded(self, response)
                self.responded = True
            request = self.request
            if request.trace is not None:
                request.trace.record_response(response, final)
            if final:
                self.state = _FINISHED
                # Releases its shared memory: the traceback of an error may keep the request alive
                # until the next garbage collection.
                request.inputs = []
                request.output_placement = request.output_placement_hints = None
                if listener is not None:
                    listener.call_finished(self)
        except Exception as error:
            response, final = self._end_with_exception(error), True
        on_result = self._on_result
        if on_result is not None:
            self._on_result = None
            if not final:
                self.cancel()
            try:
                if response is not None and response.error is None and final:
                    on_result(response)
                else:
                    on_result(_single_result(response, final))
            except Exception as error:
                on_result(_single_result(self._end_with_exception(error), True))
            return
        callback = self._callback
        if callback is not None:
            if final:
                self._callback = None  # breaks a reference cycle
            try:
                callback(response, final)
            except Exception as error:
                self._callback = None
                callback(self._end_with_exception(error), True)
            return
        if self._responses is None:
            self._responses = deque()
        self._responses.append((response, final))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _end_with_exception(self, error: Exception) -> InferResponse:
        """Logs an unexpected exception and ends the call; returns the response for the caller."""
        request = self.request
        self._log_exception(error)
        self.failed = True
        if self.state is not _FINISHED:
            if not self.ended:
                self._withdraw_from_holder()
            self.state = _FINISHED
            request.inputs = []
            request.output_placement = request.output_placement_hints = None
            if self.listener is not None:
                try:
                    self.listener.call_finished(self)
                except Exception:  # a defect of ours: the caller gets its response all the same
                    _log.exception("a request to model '%s' was not counted", request.model_name)
        return InferResponse(
            request.model_name,
            request.model_version,
            request.id,
            error=unexpected_failure(error),
        )

    def _log_exception(self, error: Exception) -> None:
        _log.error(
            "unexpected failure of a request to model '%s'",
            self.request.model_name,
            exc_info=error,
        )

    def _withdraw_from_holder(self) -> None:
        try:
            if self.holder is not None:
                self.holder.cancel_call(self)
        except Exception:  # the caller gets its error all the same
            _log.exception(
                "unexpected failure of the cancellation of a request to model '%s'",
                self.request.model_name,
            )

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
        """Called when the caller has processed a response; the model may send the next one.

        If the model raises an exception, it is logged, and the call ends with an INTERNAL error.
        """
        if self.on_response_acknowledged is not None and not self.finished:
            try:
                self.on_response_acknowledged(response)
            except Exception as error:
                self._log_exception(error)
                self.abort(unexpected_failure(error))

    def fail(self, error: HostError) -> None:
        """Ends the call with an error response."""
        request = self.request
        self.respond(
            InferResponse(request.model_name, request.model_version, request.id, error=error)
        )

    def cancel(self) -> None:
        """Cancels the call, as the caller has gone; the verbose log has a line about it."""
        if self.ended:
            return
        request = self.request
        _log.debug(
            "[request id: %s] Cancellation notification received for a request to model '%s'",
            request.id or "<id_unknown>", request.model_name,
        )  # fmt: skip
        self.abort(HostError(ErrorCode.CANCELLED, ""))

    def abort(self, error: HostError) -> None:
        """Withdraws the call from its holder and ends it with this error."""
        if self.ended:
            return
        self._set_aborted(error)
        self._withdraw_from_holder()
        self.fail(error)

    def request_cancellation(self, error: HostError) -> None:
        """Asks the model to stop.

        A model that has the request is notified, and its further responses are passed on. A call
        that no model has ends with this error.
        """
        if self.state is not _RUNNING:
            return
        self.state = _CANCELLING
        self.cancellation_error = error
        if self.holder is None or not self.holder.cancel_call(self):
            self._set_aborted(error)
            self.fail(error)

    def _set_aborted(self, error: HostError) -> None:
        self.state = _ABORTED
        if error.code is ErrorCode.CANCELLED:
            self.failure_reason = FailureReason.CANCELED

    def subscribe(
        self, callback: ResponseCallback, on_computed: ComputeCallback | None = None
    ) -> None:
        """Calls `callback` with each response, starting with those that are already here.

        `on_computed` is called with the times of the execution, before or after the last response.
        """
        self.on_computed = on_computed
        while self._responses:
            callback(*self._responses.popleft())
        if not self.finished:
            self._callback = callback

    def subscribe_single(self, callback: ResultCallback) -> None:
        """Calls `callback` once, with the only response of a unary call or with its error.

        The error is INTERNAL if there was no response, or several; the call is cancelled then.
        """
        if self._responses:
            response, final = self._responses.popleft()
            if not final:
                self.cancel()
            callback(_single_result(response, final))
        elif self.state is not _FINISHED:
            self._on_result = callback

    def undelivered_responses(self) -> list[InferResponse]:
        """The responses that are here already, and that the caller has not taken yet."""
        return [response for response, _ in self._responses or () if response is not None]

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

    async def iterate_batches(self) -> AsyncGenerator[list[InferResponse], None]:
        """Every response in order, in lists of all that have arrived.

        The last list is empty if the model ends without a response. Leaving early cancels the call.
        """
        final = False
        try:
            while not final:
                batch: list[InferResponse] = []
                response, final = await self._next()
                while True:
                    if response is not None:
                        batch.append(response)
                    if final or not self._responses:
                        break
                    response, final = self._responses.popleft()
                    if response is not None:
                        self.acknowledge_response(response)
                yield batch
        finally:
            if not final:
                self.cancel()

    async def iterate_with_final(
        self,
    ) -> AsyncGenerator[tuple[InferResponse | None, bool], None]:
        """Every response in order, and whether it is the last one; None is an end without one.

        Leaving early cancels the call.
        """
        final = False
        try:
            while not final:
                response, final = await self._next()
                yield response, final
        finally:
            if not final:
                self.cancel()

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


class Batch(msgspec.Struct, eq=False):
    """Calls that run together.

    `on_released`: called if the instance can take the next batch before the end of this one.
    `on_done`: called at the end, with the batch and its times, None if it has none; and whether the
    instance can take the next batch from now on.
    `report`: counts this and other batches of the stub that have ended, after their responses.
    `on_returned`: called if the stub returns a prefetched call without running it; None if the call
    was not sent to be returned.
    """

    calls: Sequence[Call]
    on_released: Callable[[], None]
    on_done: Callable[[Batch, ExecutionTimes | None, bool], None]
    report: Callable[[Sequence[Batch]], None]
    on_returned: Callable[[Call], None] | None = None
    number: int = 0
    instance_free: bool = False
    """Whether the instance no longer works on it."""
    answered: set[int] = msgspec.field(default_factory=set)
    """Indexes of calls with a final response."""
    deferred: Sequence[int] = ()
    """Indexes of calls that are answered after the end."""
    rescheduled: Sequence[int] = ()
    """Indexes of calls that the model wants to get again."""
    again: Sequence[int] = ()
    """Those of them that it will get again."""
    times: ExecutionTimes | None = None
    """Set at the end; None if all callers had gone before the batch started."""

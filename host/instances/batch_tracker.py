"""Tracks the batches that one stub works on, and their responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from host.errors import HostError, internal, unavailable
from host.inference.call import Call, CallHolder, CallState
from host.inference.request import ExecutionTimes, InferResponse, Tensor
from host.instances.batch import Batch
from host.instances.bls_requests import BlsRequests
from host.instances.client_memory import write_outputs
from host.instances.flow_control import ACK_COUNT, FlowControlSettings, ResponseAckSender
from host.instances.transfer import TensorTransfer
from stub.wire import messages as m
from stub.wire.payload import INLINE_ALWAYS, WireResponse

Action = Callable[[], None]
"""An effect of a message, carried out once the whole frame was decoded."""


NOT_RESCHEDULED = (
    "Failed to release request: Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,"
    " while the model is not configured to handle such a flag."
)


class BatchTracker:
    """`send`: sends a message to the stub's service thread. `log`: logs a line about calls.

    `bls_requests`: the BLS requests of its batches. `clock`: returns the time in nanoseconds.
    """

    def __init__(
        self,
        transfer: TensorTransfer,
        send: Callable[[m.ToStub], None],
        log: Callable[[m.LogLine, Sequence[Call]], None],
        bls_requests: BlsRequests,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.name = ""
        self.version = -1
        self.decoupled = False
        self.runs_coroutines = False
        self.max_outstanding_responses = FlowControlSettings.max_outstanding_responses
        self.restore_shape: Callable[[Tensor], Tensor] | None = None  # to the client's shape
        self._on_idle: Callable[[], None] | None = None
        self._wait_allowed = True
        self._transfer = transfer
        self._send = send
        self._log = log
        self._bls_requests = bls_requests
        self._clock = clock
        self._number = 0
        self._batches: dict[int, Batch] = {}  # running, or with outstanding responses
        self._prefetched: list[Call] = []

    @property
    def running(self) -> bool:
        """Whether a batch is inside `execute`."""
        return any(not batch.instance_free for batch in self._batches.values())

    @property
    def blocking_batches(self) -> list[int]:
        """Numbers of the batches: one of them has to end before the stub can take another."""
        under_way = [batch for batch in self._started_batches() if not batch.deferred]
        if all(batch.instance_free for batch in under_way):
            return []
        return [batch.number for batch in under_way]

    def _started_batches(self) -> list[Batch]:
        """The batches that were not prefetched."""
        started: list[Batch] = []
        busy = False
        for batch in self._batches.values():
            if not (busy and not batch.instance_free):
                started.append(batch)
            busy = busy or not batch.instance_free
        return started

    @property
    def started_calls(self) -> list[Call]:
        """The calls in progress that were not prefetched."""
        return [call for batch in self._started_batches() for call in batch.calls]

    @property
    def idle(self) -> bool:
        """Whether no batch is in progress."""
        return not self._batches

    async def wait_idle(self, seconds: float) -> None:
        """Waits until no batch is in progress, at most `seconds`."""
        if self._wait_allowed and not self.idle:
            idle = asyncio.Event()
            self._on_idle = idle.set
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(idle.wait(), seconds)

    def skip_wait_idle(self) -> None:
        """Makes `wait_idle` return, now and in the future."""
        self._wait_allowed = False
        if self._on_idle is not None:
            self._on_idle()

    def calls_of_batch(self, number: int) -> Sequence[Call]:
        """The calls of a batch in progress; empty for other numbers."""
        batch = self._batches.get(number)
        return batch.calls if batch is not None else ()

    def add_batch(self, batch: Batch) -> int:
        """Adds a batch that is about to be sent; returns its number."""
        self._number = batch.number = self._number + 1
        self._batches[batch.number] = batch
        return batch.number

    def cancel_call(self, call: Call) -> bool:
        """Cancels a call; returns whether the stub has it and was told."""
        return any(
            self._send_cancel(batch, batch.calls.index(call), call)
            for batch in self._batches.values()
            if call in batch.calls
        )

    def _send_cancel(self, batch: Batch, index: int, call: Call) -> bool:
        self._send(m.CancelRequest(batch.number, index))
        if all(c.state is not CallState.RUNNING for c in batch.calls):
            self._bls_requests.cancel_batch(batch.number)
        return True

    def _detach_from_instance(self, batch: Batch, index: int, call: Call) -> None:
        """Lets the call continue while its instance is free for other batches."""
        cancel = partial(self._send_cancel, batch, index)
        call.holder = _DetachedCall(self._bls_requests, batch.number, cancel)

    # Messages of the stub. Each raises KeyError, IndexError or ValueError if it is invalid.

    def handle_response(self, message: m.Response) -> Action:
        """A response to one of the calls."""
        batch, index = self._batches[message.batch], message.index
        if index < 0 or index in batch.final_indexes:
            raise ValueError(f"a response to request {index}, which is answered or unknown")
        call = batch.calls[index]
        if not message.final and not self.decoupled:
            raise ValueError("several responses of a model that is not decoupled")
        answer = self._decode_response(call, message.response)
        if message.final:
            batch.final_indexes.append(index)
            if batch.deferred and len(batch.final_indexes) == len(batch.calls):
                self._remove_batch(batch)
        if not message.final and call.on_response_acknowledged is None:
            request = call.request
            # Outputs in memory of the client do not count as bytes here.
            single = request.output_placement or request.max_outstanding_responses == 1
            limit = 1 if single else min(ACK_COUNT, max(1, self.max_outstanding_responses // 2))
            acks = ResponseAckSender(self._send, batch.number, index, limit, self._clock)
            call.on_response_acknowledged = acks.count_response
        return partial(call.respond, answer, message.final)

    def handle_single_response(self, messages: Sequence[m.ToHost]) -> Action | None:
        """Handles the most frequent frame: the only response of a batch of one call, and its end.

        The frame may also contain released blocks, which the caller handles. The effect is that of
        `handle_response` and `handle_batch_done` at a fraction of the cost. Returns None for other
        frames, without an effect. Raises as those do.
        """
        if len(messages) == 2:
            answer, end = messages
        elif len(messages) == 3 and type(messages[2]) is m.BlockRelease:
            answer, end, _ = messages
        else:
            return None
        if type(answer) is not m.Response or type(end) is not m.BatchDone:
            return None
        batch = self._batches.get(end.batch)
        if (
            batch is None
            or answer.batch != end.batch
            or answer.index
            or not answer.final
            or len(batch.calls) != 1
            or batch.final_indexes
            or batch.instance_free
            or not end.started
            or end.failure is not None
            or end.deferred
            or end.rescheduled
        ):
            return None
        call = batch.calls[0]
        response = self._decode_response(call, answer.response)
        del self._batches[end.batch]
        times = ExecutionTimes(end.started, end.inputs_ready, end.outputs_begin, end.ended)

        def act() -> None:
            # The response is delivered before it is counted.
            try:
                call.record_compute_times(times)
                batch.on_done(batch, times)
                self._release_instance(batch)
            finally:
                try:
                    call.respond(response, True)
                finally:
                    batch.report(batch, times)

        return act

    def _decode_response(self, call: Call, response: WireResponse | None) -> InferResponse | None:
        if response is None:
            return None
        request = call.request
        answer = InferResponse(request.model_name, self.version, request.id)
        if response.error is not None:
            answer.error = self._transfer.decode_error(response.error)
            call.failed = True
            return answer
        decode = self._transfer.decode_output
        wanted = request.output_placement or request.output_placement_hints
        try:
            answer.outputs = [decode(output, wanted) for output in response.outputs]
        except HostError as error:
            answer.error = error.with_traceback(None)  # it refers to the response, and so to blocks
            call.failed = True
            return answer
        if self.restore_shape is not None:
            answer.outputs = [self.restore_shape(output) for output in answer.outputs]
        answer.parameters = response.parameters
        call.prepare_response(answer)
        if answer.error is not None:
            call.failed = True
        elif request.output_placement:
            answer.error = write_outputs(request.output_placement, answer.outputs)
            call.failed = answer.error is not None
        return answer

    def handle_released(self, message: m.InstanceReleased) -> Action:
        """The batch continues as a coroutine."""
        batch = self._batches.get(message.batch)
        if batch is None and 0 < message.batch <= self._number:
            return lambda: None  # the batch has already ended
        batch = self._batches[message.batch]
        batch.instance_free = True
        for index, call in enumerate(batch.calls):
            self._detach_from_instance(batch, index, call)
        return batch.on_released

    def handle_batch_done(self, message: m.BatchDone) -> tuple[Action, Action, Action]:
        """`execute` has returned. The actions count the batch, free the instance, and finish it."""
        batch = self._batches[message.batch]
        known = range(len(batch.calls))
        if any(index not in known for index in (*message.deferred, *message.rescheduled)):
            raise ValueError("the end of a batch, with requests that it does not have")
        if message.failure is not None:
            self._log_error(message.failure, batch.calls)
        final_indexes = set(batch.final_indexes)
        deferred = [index for index in message.deferred if index not in final_indexes]
        for index in deferred:
            self._detach_from_instance(batch, index, batch.calls[index])
        batch.deferred = deferred
        # Before the instance is free, as rescheduled calls may be in its next batch.
        again = [i for i in message.rescheduled if batch.calls[i].try_reschedule()]
        if deferred:
            batch.final_indexes = [i for i in range(len(batch.calls)) if i not in deferred]
        else:
            self._batches.pop(batch.number)
        times = None
        if message.started:  # otherwise all callers had gone before it started
            times = ExecutionTimes(
                message.started, message.inputs_ready, message.outputs_begin, message.ended
            )
        return (
            partial(self._report_times, batch, times),
            partial(self._release_instance, batch),
            partial(self._fail_unanswered, batch, message.rescheduled, again),
        )

    def _report_times(self, batch: Batch, times: ExecutionTimes | None) -> None:
        for call in batch.calls:
            call.record_compute_times(times)
        batch.on_done(batch, times)
        if times is not None:
            batch.report(batch, times)

    def _release_instance(self, batch: Batch) -> None:
        if not batch.instance_free:
            batch.instance_free = True
            batch.on_released()
        if self._on_idle is not None:
            self._notify_if_idle()

    def _fail_unanswered(
        self, batch: Batch, rescheduled: Sequence[int], again: Sequence[int]
    ) -> None:
        for index, call in enumerate(batch.calls):
            if index in batch.deferred or index in again or call.finished:
                continue
            if call.cancellation_error is not None:  # before its batch started
                call.abort(call.cancellation_error)
            elif index in rescheduled:
                self._log_error(NOT_RESCHEDULED, [call])
                call.fail(internal(NOT_RESCHEDULED))
            else:
                call.fail(internal(f"instance '{self.name}' ended a batch without answering it"))

    def _log_error(self, text: str, calls: Sequence[Call]) -> None:
        self._log(m.LogLine(2, "executor.py", 0, text), calls)

    def finish_unsent(self, batch: Batch) -> None:
        """Ends a batch whose calls could not be sent, unless the stub has died since."""
        if self._batches.pop(batch.number, None) is not None:
            batch.on_done(batch, None)
            self._release_instance(batch)

    def accepts_prefetch(self, call: Call) -> bool:
        """Whether the call may be sent while another batch runs."""
        return not self.decoupled and self._transfer.fits_inline(call.request)

    def accepts_reclaimable(self, call: Call) -> bool:
        """Whether the call may be sent and reclaimed later: its message refers to no memory.

        None of a coroutine function may: its event loop takes every frame as soon as it arrives.
        """
        request = call.request
        if self.decoupled or self.runs_coroutines:
            return False
        if request.output_placement or request.output_placement_hints:
            return False
        for tensor in request.inputs:
            if tensor.owner is not None or len(tensor.data) > INLINE_ALWAYS:
                return False
        return True

    def withdraw_batch(self, number: int) -> Sequence[Call]:
        """Forgets a batch that the stub will not run; returns its calls."""
        calls = self._batches.pop(number).calls
        for call in calls:
            call.record_compute_times(None)
        return calls

    def handle_returned(self, message: m.BatchReturned) -> Action:
        """The stub has set out to wait in `execute` and returns a batch that was sent ahead."""
        batch = self._batches[message.batch]
        if batch.on_returned is None or batch in self._started_batches():
            raise ValueError("a batch was returned that was not prefetched")
        (call,) = self.withdraw_batch(message.batch)
        return partial(batch.on_returned, call)

    def fail_prefetched(self, reason: str) -> None:
        """Fails prefetched calls that no other stub has taken over."""
        for call in self.drain_prefetched():
            call.fail(unavailable(f"{reason} before it had begun with this request."))

    def drain_prefetched(self) -> Sequence[Call]:
        """Returns, once, the prefetched calls that the stub had not started when it died."""
        prefetched, self._prefetched = self._prefetched, []
        return prefetched

    def fail_started(self, error: HostError) -> None:
        """Fails the calls that the stub has started."""
        for batch in self._started_batches():
            for call in batch.calls:
                call.fail(error)

    def stub_exited(self, reason: str) -> None:
        """Fails the calls that the stub had started when it died."""
        started = self._started_batches()
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            if batch not in started:
                for call in batch.calls:
                    call.record_compute_times(None)
                self._prefetched += batch.calls
        for batch in started:
            for call in batch.calls:
                call.fail(unavailable(f"{reason} while it ran this request."))
            if not batch.deferred:
                self._report_times(batch, None)
        self._notify_if_idle()

    def _remove_batch(self, batch: Batch) -> None:
        self._batches.pop(batch.number, None)
        self._notify_if_idle()

    def _notify_if_idle(self) -> None:
        if self._on_idle is not None and not self._batches:
            self._on_idle()


class _DetachedCall(CallHolder):
    """Holds a call that continues after its instance is free for the next batch."""

    __slots__ = ("_batch", "_bls_requests", "_send_cancel")

    def __init__(
        self, bls_requests: BlsRequests, batch: int, send_cancel: Callable[[Call], bool]
    ) -> None:
        self._bls_requests = bls_requests
        self._batch = batch
        self._send_cancel = send_cancel

    def cancel_call(self, call: Call) -> bool:
        """Tells the stub that no response is wanted."""
        return self._send_cancel(call)

    @property
    def potentially_blocking_calls(self) -> Sequence[Sequence[Call]]:
        """The BLS requests made for these calls."""
        return [self._bls_requests.calls_of_batch(self._batch)]

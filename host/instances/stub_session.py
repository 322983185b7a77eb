"""The session with one stub: batches and other messages out, a frame in, its results out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from host.errors import HostError, internal, unavailable, unexpected_failure
from host.inference.call import Batch, Call, CallHolder, CallState
from host.inference.request import ExecutionTimes, InferResponse, Tensor
from host.instances.arenas import HOST_ARENA, arena_full_error
from host.instances.bls_requests import BlsRequest, BlsRequests
from host.instances.flow_control import ACK_COUNT, FlowControlSettings, ResponseAckSender
from host.instances.regions import write_outputs
from host.instances.services import HostServices
from host.instances.stub_link import Link, ReclaimedFrame
from host.instances.stub_log import StubLog
from host.instances.transfer import WORK, TensorTransfer
from host.lane import results_reader
from pb_utils._datatypes import NAMES
from pb_utils._model_texts import NOT_RESCHEDULED
from stub.wire import messages as m
from stub.wire.arena import ArenaFull, Block
from stub.wire.messages import INLINE_ALWAYS, WireRequest
from stub.wire.session import TRANSITIONS, ProtocolError, Session, State

_log = logging.getLogger("pbhost")

_SERVING = State.SERVING
_CLOSED_STATES = (State.ERROR, State.ENDED)
_lane = None
if results_reader is not None:
    _lane = results_reader(Tensor, ExecutionTimes, NAMES)

_NOT_BEGUN = "before it had begun with this request."


class _Results(msgspec.Struct):
    """What messages mean, until all of a frame are decoded, or all frames of one batch each."""

    responses: list[tuple[Call, InferResponse | None, bool]] = []
    ended: list[Batch] = []
    # Most frames have none of these:
    bls_requests: tuple[BlsRequest, ...] = ()
    released: tuple[Batch, ...] = ()
    returned: tuple[tuple[Batch, Call], ...] = ()


_NO_RESULTS = _Results()


class StubSession:
    """Sends work to one stub, tracks its batches, and acts on its frames.

    Work and messages of the service for a stub that is gone are dropped. Methods that send raise
    ProtocolError for a message that the state forbids.
    """

    def __init__(
        self,
        services: HostServices,
        log: StubLog,
        handlers: Mapping[type, Callable[[Any], None]],
        on_fault: Callable[[Exception], None],
        on_failure: Callable[[Exception], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`handlers`: by type, for messages about neither batches nor BLS requests nor blocks.

        `on_fault`: called if the stub breaks the protocol. `on_failure`: called if a message is
        lost by a defect of the host. `clock`: returns the time in nanoseconds. Raises OSError.
        """
        self.name = ""
        self.version = -1
        self.decoupled = False
        self.runs_coroutines = False
        self.max_outstanding_responses = FlowControlSettings.max_outstanding_responses
        self.restore_shape: Callable[[Tensor], Tensor] | None = None  # to the client's shape
        arena = services.arenas.create_arena()
        self.protocol = Session()
        self.link = Link(services.channel, services.busy_poller, on_fault)
        self.transfer = TensorTransfer(
            services.arenas,
            arena,
            self._send_block_releases,
            self._close_arena,
            self.link.inline_limit,
            self.link.bls_inline_limit,
        )
        self.bls_requests = BlsRequests(
            services, self.transfer, self.protocol, self.send_work, self._send_bls_responses
        )
        self._log = log
        self._handlers: dict[type, Callable[[Any], None]] = {
            **handlers,
            m.Response: self._on_response,
            m.BatchDone: self._on_batch_done,
            m.InstanceReleased: self._on_released,
            m.BatchReturned: self._on_returned,
            m.BlsRequest: self._on_bls_request,
            m.CancelBls: self._on_cancel_bls,
            m.BlockRelease: self.transfer.release_blocks,
        }
        self._on_fault = on_fault
        self._on_failure = on_failure
        self._clock = clock
        self._number = 0  # of the last batch
        self._batches: dict[int, Batch] = {}  # running, or with outstanding responses
        self._results = _Results()  # of the frames that are decoded
        self._prefetched: Sequence[Call] = ()
        self._on_idle: Callable[[], None] | None = None
        self._wait_allowed = True
        self._exit_reason = ""

    def start_reading(self) -> None:
        """Acts on every frame from now on."""
        self.link.start_reading(self.handle_frames)

    # Messages to the stub

    def send_work(
        self, messages: Sequence[m.ToStub], reclaimed: ReclaimedFrame | None = None
    ) -> None:
        """Sends a frame to the stub's main thread; `reclaimed` is as for `Link.send_work`."""
        if self._may_send(messages):
            self.link.send_work(messages, reclaimed)

    def send_service(self, messages: Sequence[m.ToStub]) -> None:
        """Sends a frame to the stub's service thread."""
        if self._may_send(messages):
            self.link.send_service(messages)

    def notify(self, message: m.ToStub) -> None:
        """Sends one message to the stub's service thread."""
        self.send_service([message])

    def _send_bls_responses(self, messages: Sequence[m.ToStub]) -> None:
        """Sends a frame of BLS responses to the thread of the stub that reads them."""
        if self._may_send(messages):
            self.link.send_bls_responses(messages)

    def _send_block_releases(self) -> None:
        releases = self.transfer.collect_releases()
        if releases is not None:
            self.notify(releases)

    def _close_arena(self, message: m.CloseArena) -> None:
        if self.protocol.state is State.SERVING:
            self.notify(message)

    def _may_send(self, messages: Sequence[m.ToStub]) -> bool:
        """Whether the stub is there; follows its state. Raises ProtocolError."""
        protocol = self.protocol
        if protocol.state in _CLOSED_STATES:
            return False
        for message in messages:
            protocol.advance(message)
        return True

    def mark_failed(self) -> None:
        """Stops sending and reading."""
        self.protocol.state = State.ERROR
        self.link.stop_reading()

    # Batches

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

    def calls_of_batch(self, number: int) -> Sequence[Call]:
        """The calls of a batch in progress; empty for other numbers."""
        batch = self._batches.get(number)
        return batch.calls if batch is not None else ()

    def run_batch(self, batch: Batch) -> None:
        """Runs a batch. Calls whose tensors do not fit into memory fail; the others run.

        A batch that may be returned may also be reclaimed. If no call can be sent, the batch ends
        later; but of a prefetched one, the scheduler sees that its calls have failed.
        """
        calls, transfer = batch.calls, self.transfer
        frame: list[m.ToStub] = []
        requests: list[WireRequest] = []
        failed: dict[Call, HostError] = {}
        for call in calls:
            try:
                if self._exit_reason:  # the scheduler does not know yet that the stub has ended
                    raise unavailable(f"{self._exit_reason} {_NOT_BEGUN}")
                requests.append(transfer.encode_request(call.request, WORK, frame, len(calls)))
            except HostError as error:
                failed[call] = error.with_traceback(None)
            except ArenaFull as full:
                failed[call] = arena_full_error(full)
            except Exception as error:  # a defect: the other requests of the batch continue
                _log.exception(
                    "a request cannot be sent to the model", extra={"instance": self._log.label}
                )
                failed[call] = unexpected_failure(error)
        if failed:
            batch.calls = [call for call in calls if call not in failed]
        if requests or not self.running:
            self._number = batch.number = self._number + 1
            self._batches[batch.number] = batch
        if requests:
            if transfer.dropped and (releases := transfer.collect_releases()) is not None:
                frame.append(releases)
            reclaimable = batch.on_returned is not None
            reclaimed = (batch.number, tuple(frame)) if reclaimable else None
            frame.append(m.Execute(batch.number, requests, reclaimable))
            if self.protocol.state is _SERVING:  # which allows all these messages
                held = not reclaimable and bool(self.bls_requests.blocking_calls)
                self.link.send_work(frame, reclaimed, held)
            else:
                self.send_work(frame, reclaimed)
        else:
            if frame:  # arenas that count as announced
                self.send_work(frame)
            if batch.number:
                asyncio.get_running_loop().call_soon(self._end_unsent, batch)
        for call, failure in failed.items():
            call.fail(failure)

    def _end_unsent(self, batch: Batch) -> None:
        """Ends a batch whose calls could not be sent, unless the stub has died since."""
        if self._batches.pop(batch.number, None) is not None:
            batch.on_done(batch, None, True)
            self._notify_if_idle()

    def accepts_prefetch(self, call: Call) -> bool:
        """Whether the call may be sent while another batch runs.

        None may that needs or has shared memory of the host.
        """
        size = 0
        for tensor in call.request.inputs:
            if not isinstance(tensor.owner, Block) or tensor.owner.arena == HOST_ARENA:
                size += len(tensor.data)
        return not self.decoupled and (size <= INLINE_ALWAYS or size <= self.link.inline_limit())

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

    def reclaim_prefetched(self, most: int) -> list[Call]:
        """Takes back at most `most` batches that the stub has not taken; returns their calls."""
        calls: list[Call] = []
        for number, other_messages in self.link.reclaim_frames(most):
            calls += self._withdraw_batch(number)
            if other_messages:
                self.send_work(other_messages)
        return calls

    def _withdraw_batch(self, number: int) -> Sequence[Call]:
        """Forgets a batch that the stub will not run; returns its calls."""
        calls = self._batches.pop(number).calls
        for call in calls:
            call.record_compute_times(None)
        return calls

    def cancel_call(self, call: Call) -> bool:
        """Cancels a call; returns whether the stub has it and was told."""
        return any(
            self._send_cancel(batch, batch.calls.index(call), call)
            for batch in self._batches.values()
            if call in batch.calls
        )

    def _send_cancel(self, batch: Batch, index: int, call: Call) -> bool:
        self.notify(m.CancelRequest(batch.number, index))
        if all(c.state is not CallState.RUNNING for c in batch.calls):
            self.bls_requests.cancel_batch(batch.number)
        return True

    def _detach_from_instance(self, batch: Batch, index: int) -> None:
        """Lets a call continue while its instance is free for other batches."""
        cancel = partial(self._send_cancel, batch, index)
        batch.calls[index].holder = _DetachedCall(self.bls_requests, batch.number, cancel)

    # Frames of the stub

    def handle_frames(self, frames: Sequence[bytes]) -> None:
        """Decodes frames and acts on them, in their order.

        Usual results of several batches are acted on together, also with a BLS request after them;
        any other frame alone. A message that breaks the protocol is the last one; those before it
        take effect, so that no call is lost.
        """
        protocol = self.protocol
        remaining = iter(frames)
        try:
            try:
                while (frame := self._end_batches(remaining)) is not None:
                    messages = m.decode_to_host(frame)
                    if not (len(messages) == 1 and type(messages[0]) is m.BlsRequest):
                        self._act_on_results()
                    for message in messages:
                        kind = type(message)
                        if TRANSITIONS[protocol.state].get(kind) is not protocol.state:
                            protocol.advance(message)
                        self._handlers[kind](message)
                    self._act_on_results()
            finally:
                self._act_on_results()
        except (msgspec.DecodeError, ProtocolError, KeyError, ValueError, IndexError) as error:
            self._on_fault(error)
        except Exception as error:  # a defect of ours
            self._on_failure(error)

    def _end_batches(self, frames: Iterator[bytes]) -> bytes | None:
        """Decodes usual results of whole batches; returns the first frame with something else.

        Each of the requests has one response, without error, parameters and shared memory.
        """
        if _lane is None or self.protocol.state is not _SERVING:
            return next(frames, None)
        results = self._results
        for frame in frames:
            whole = _lane.decode_results(frame)
            if whole is None:
                return frame
            number, outputs, times = whole
            batch = self._batches.get(number)
            if (
                batch is None
                or batch.answered
                or batch.deferred
                or len(outputs) != len(batch.calls)
            ):
                return frame
            for index, call in enumerate(batch.calls):
                request = call.request
                answer = InferResponse(request.model_name, self.version, request.id, outputs[index])
                if (
                    request.output_placement
                    or call.prepares_responses
                    or self.restore_shape is not None
                ):
                    self._prepare_response(call, answer)
                    call.failed = call.failed or answer.error is not None
                batch.answered.add(index)
                results.responses.append((call, answer, True))
            del self._batches[number]
            batch.times = times
            results.ended.append(batch)
        return None

    def _act_on_results(self) -> None:
        """Acts on what was decoded, in this order: what fails leaves the rest to be done.

        BLS requests start first: the model waits for them, and their models run while the rest is
        done. The instance gets its next batch before the only response of one is delivered. Several
        responses are delivered before that, as their callers may send calls for that batch. A
        response is delivered before its batch is counted.
        """
        results = self._results
        ended, responses = results.ended, results.responses
        if not ended and results == _NO_RESULTS:
            return
        self._results = _Results()  # these refer to memory of the stub
        for batch in results.released:
            try:
                batch.on_released()
            except Exception:  # a defect of ours
                self._log_failure()
        bls_requests = self.bls_requests
        for made in results.bls_requests:
            try:
                bls_requests.start_request(made)
            except Exception:  # a defect of ours
                self._log_failure()
        several = len(responses) > max(1, len(ended))
        for batch in ended:
            try:
                for call in batch.calls:
                    if call.on_computed is not None or call.request.trace is not None:
                        call.record_compute_times(batch.times)
            except Exception:  # a defect of ours
                self._log_failure()
        if several:
            self._deliver(responses)
        if bls_requests.blocking_calls or bls_requests.pending:
            for batch in ended:
                bls_requests.end_batch(batch.number)
            if not bls_requests.blocking_calls:
                self.link.send_queued()
        for batch in ended:
            try:
                released = not batch.instance_free
                batch.instance_free = True
                batch.on_done(batch, batch.times, released)
            except Exception:  # a defect of ours
                self._log_failure()
        if self._on_idle is not None:
            self._notify_if_idle()
        if not several:
            self._deliver(responses)
        if ended:
            try:
                ended[0].report(ended)
            except Exception:  # a defect of ours
                self._log_failure()
        for batch in ended:
            try:
                if batch.deferred or len(batch.answered) < len(batch.calls):
                    self._fail_unanswered(batch)
            except Exception:  # a defect of ours
                self._log_failure()
        for batch, call in results.returned:
            try:
                assert batch.on_returned is not None
                batch.on_returned(call)
            except Exception:  # a defect of ours
                self._log_failure()
        for made in results.bls_requests:
            try:
                bls_requests.break_deadlock(made)
            except Exception:  # a defect of ours
                self._log_failure()

    def _deliver(self, responses: Sequence[tuple[Call, InferResponse | None, bool]]) -> None:
        for call, response, final in responses:
            try:
                call.respond(response, final)
            except Exception:  # a defect of ours
                self._log_failure()

    def _log_failure(self) -> None:
        _log.exception("unexpected failure", extra={"instance": self._log.label})

    # Each of these decodes one message, and raises KeyError, IndexError or ValueError if it is
    # invalid.

    def _on_response(self, message: m.Response) -> None:
        """A response to one of the calls."""
        batch, index, final = self._batches[message.batch], message.index, message.final
        if index < 0 or index in batch.answered:
            raise ValueError(f"a response to request {index}, which is answered or unknown")
        call = batch.calls[index]
        if not final and not self.decoupled:
            raise ValueError("several responses of a model that is not decoupled")
        request, response = call.request, message.response
        answer: InferResponse | None = None
        if response is not None:
            answer = InferResponse(request.model_name, self.version, request.id)
            try:
                if response.error is not None:
                    raise self.transfer.decode_error(response.error)
                wanted = request.output_placement or request.output_placement_hints
                answer.outputs = self.transfer.decode_outputs(response.outputs, wanted)
                answer.parameters = response.parameters
            except HostError as error:
                answer.error = error.with_traceback(None)  # which refers to the response, so blocks
            if (
                request.output_placement
                or call.prepares_responses
                or self.restore_shape is not None
            ):
                self._prepare_response(call, answer)
            call.failed = call.failed or answer.error is not None
        if final:
            batch.answered.add(index)
            if batch.deferred and len(batch.answered) == len(batch.calls):
                del self._batches[batch.number]
                self._notify_if_idle()
        elif call.on_response_acknowledged is None:
            # Outputs in memory of the client do not count as bytes here.
            single = request.output_placement or request.max_outstanding_responses == 1
            limit = 1 if single else min(ACK_COUNT, max(1, self.max_outstanding_responses // 2))
            acks = ResponseAckSender(self.notify, batch.number, index, limit, self._clock)
            call.on_response_acknowledged = acks.count_response
        self._results.responses.append((call, answer, final))

    def _prepare_response(self, call: Call, answer: InferResponse) -> None:
        """Gives outputs the client's shape and its memory, and lets the call change them."""
        if answer.error is not None:
            return
        if self.restore_shape is not None:
            answer.outputs = [self.restore_shape(output) for output in answer.outputs]
        if call.prepares_responses:
            call.prepare_response(answer)
        if answer.error is None and call.request.output_placement:
            answer.error = write_outputs(call.request.output_placement, answer.outputs)

    def _on_batch_done(self, message: m.BatchDone) -> None:
        """`execute` has returned."""
        batch = self._batches[message.batch]
        if batch.deferred:
            raise ValueError(f"a second end of batch {message.batch}")
        started, ended = message.started, message.ended
        if not 0 <= started <= message.inputs_ready <= message.outputs_begin <= ended:
            raise ValueError(f"times of batch {message.batch} that are not in order")
        if message.deferred or message.rescheduled:
            self._keep_unanswered(batch, message)
        if message.failure is not None:
            self._log_error(message.failure, batch.calls)
        if not batch.deferred:
            del self._batches[batch.number]
        if started:  # otherwise all callers had gone before it started
            batch.times = ExecutionTimes(
                started, message.inputs_ready, message.outputs_begin, ended
            )
        self._results.ended.append(batch)

    def _keep_unanswered(self, batch: Batch, message: m.BatchDone) -> None:
        """Lets calls continue that are answered later or run again."""
        known = range(len(batch.calls))
        if any(index not in known for index in (*message.deferred, *message.rescheduled)):
            raise ValueError("the end of a batch, with requests that it does not have")
        batch.deferred = [index for index in message.deferred if index not in batch.answered]
        for index in batch.deferred:
            self._detach_from_instance(batch, index)
        if batch.deferred:
            batch.answered = set(known).difference(batch.deferred)
        # Before the instance is free, as rescheduled calls may be in its next batch.
        batch.rescheduled = message.rescheduled
        batch.again = [i for i in message.rescheduled if batch.calls[i].try_reschedule()]

    def _fail_unanswered(self, batch: Batch) -> None:
        """Ends the calls that the batch has neither answered nor kept."""
        for index, call in enumerate(batch.calls):
            if index in batch.deferred or index in batch.again or call.finished:
                continue
            if call.cancellation_error is not None:  # before its batch started
                call.abort(call.cancellation_error)
            elif index in batch.rescheduled:
                self._log_error(NOT_RESCHEDULED, [call])
                call.fail(internal(NOT_RESCHEDULED))
            else:
                call.fail(internal(f"instance '{self.name}' ended a batch without answering it"))

    def _log_error(self, text: str, calls: Sequence[Call]) -> None:
        self._log.log_line(m.LogLine(2, "executor.py", 0, text), calls)

    def _on_released(self, message: m.InstanceReleased) -> None:
        """The batch continues as a coroutine."""
        batch = self._batches.get(message.batch)
        if batch is None and 0 < message.batch <= self._number:
            return  # the batch has already ended
        batch = self._batches[message.batch]
        if batch.instance_free or batch.deferred:
            raise ValueError(f"the release of batch {message.batch}, whose instance is free")
        batch.instance_free = True
        for index in range(len(batch.calls)):
            self._detach_from_instance(batch, index)
        self._results.released += (batch,)

    def _on_returned(self, message: m.BatchReturned) -> None:
        """The stub has set out to wait in `execute` and returns a batch that was sent ahead."""
        batch = self._batches[message.batch]
        if batch.on_returned is None or batch in self._started_batches():
            raise ValueError("a batch was returned that was not prefetched")
        if len(batch.calls) != 1:
            raise ValueError(f"a batch of {len(batch.calls)} requests was returned instead of one")
        (call,) = self._withdraw_batch(message.batch)
        self._results.returned += ((batch, call),)

    def _on_bls_request(self, message: m.BlsRequest) -> None:
        """A request to another model, made for all that its batch was made for."""
        made = self.bls_requests.decode_request(message)
        calls = self.calls_of_batch(message.batch)
        ancestors = [one for call in calls for one in call.request.ancestors]
        if ancestors:
            made.request.ancestors = list(dict.fromkeys(ancestors))
        self._results.bls_requests += (made,)

    def _on_cancel_bls(self, message: m.CancelBls) -> None:
        self.bls_requests.cancel_request(message.number)

    # The end

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

    def _notify_if_idle(self) -> None:
        if self._on_idle is not None and not self._batches:
            self._on_idle()

    def fail_started(self, error: HostError) -> None:
        """Fails the calls that the stub has started."""
        for call in self.started_calls:
            call.fail(error)

    def refuse_batches(self, reason: str) -> None:
        """Called when the stub has ended; later batches fail."""
        self._exit_reason = reason

    def stub_exited(self, reason: str) -> None:
        """Fails the calls that the stub had started when it died."""
        started = self._started_batches()
        batches, self._batches = self._batches, {}
        waiting = [batch for batch in batches.values() if batch not in started]
        self._prefetched = [call for batch in waiting for call in batch.calls]
        for call in self._prefetched:
            call.record_compute_times(None)
        for batch in started:
            for call in batch.calls:
                call.fail(unavailable(f"{reason} while it ran this request."))
            if not batch.deferred:
                for call in batch.calls:
                    call.record_compute_times(None)
                batch.on_done(batch, None, False)
        self._notify_if_idle()
        self.bls_requests.cancel_all()

    def drain_prefetched(self) -> Sequence[Call]:
        """Returns, once, the prefetched calls that the stub had not started when it died."""
        prefetched, self._prefetched = self._prefetched, ()
        return prefetched

    def fail_prefetched(self, reason: str) -> None:
        """Fails prefetched calls that no other stub has taken over."""
        for call in self.drain_prefetched():
            call.fail(unavailable(f"{reason} {_NOT_BEGUN}"))


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

"""The batches that one stub works on, and the answers that come of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from host.errors import HostError, internal, unavailable
from host.inference.request import Call, InferResponse, Tensor, Times
from host.instances.batch import Batch
from host.instances.bls_requests import Questions
from host.instances.client_memory import deliver
from host.instances.transfer import Transfer
from stub.wire import messages as m
from stub.wire.payload import WireResponse

Action = Callable[[], None]
"""What a message leads to, once all of its frame is understood."""

_TAKEN_COUNT, _TAKEN_BYTES = 32, 1 << 20
"""Responses taken, or bytes of them, after which the stub is told; below what it may have under
way, so that a sender never waits for word of what was taken long ago."""


@dataclass(frozen=True)
class Flow:
    """Bounds what is under way to one caller: responses, and seconds that a sender waits."""

    window: int = 128
    seconds: float = 60.0


NOT_RESCHEDULED = (
    "Failed to release request: Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,"
    " while the model is not configured to handle such a flag."
)


class Work:
    """`tell` sends a message to the stub's service thread, `log` logs a line about calls.

    `questions` are what its batches have asked.
    """

    def __init__(
        self,
        transfer: Transfer,
        tell: Callable[[m.ToStub], None],
        log: Callable[[m.LogLine, Sequence[Call]], None],
        questions: Questions,
    ) -> None:
        self.name = ""
        self.version = -1
        self.decoupled = False
        self.window = Flow.window
        self.restore: Callable[[Tensor], Tensor] | None = None  # gives outputs the client's shape
        self._on_idle: Callable[[], None] | None = None
        self._patient = True
        self._transfer = transfer
        self._tell = tell
        self._log = log
        self._questions = questions
        self._number = 0
        self._batches: dict[int, Batch] = {}  # running, or with answers to come
        self._unstarted: list[Call] = []

    @property
    def running(self) -> bool:
        """Whether a batch is inside `execute`."""
        return any(not batch.free for batch in self._batches.values())

    @property
    def holding(self) -> list[int]:
        """Numbers of the batches one of which has to end before the stub can take another."""
        under_way = [batch for batch in self._begun() if not batch.late]
        if all(batch.free for batch in under_way):
            return []
        return [batch.number for batch in under_way]

    def _begun(self) -> list[Batch]:
        """The batches but for those that the stub was sent ahead."""
        begun: list[Batch] = []
        busy = False
        for batch in self._batches.values():
            if not (busy and not batch.free):
                begun.append(batch)
            busy = busy or not batch.free
        return begun

    @property
    def idle(self) -> bool:
        """Whether nothing is to come of any batch."""
        return not self._batches

    async def wait_idle(self, seconds: float) -> None:
        """Return once nothing is to come of any batch, or the time is over."""
        if self._patient and not self.idle:
            idle = asyncio.Event()
            self._on_idle = idle.set
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(idle.wait(), seconds)

    def stop_waiting(self) -> None:
        """Have `wait_idle` return, now and in future, whatever runs."""
        self._patient = False
        if self._on_idle is not None:
            self._on_idle()

    def calls(self, number: int) -> Sequence[Call]:
        """Those of a batch that has not ended; none of any other."""
        batch = self._batches.get(number)
        return batch.calls if batch is not None else ()

    def add(self, batch: Batch) -> int:
        """The batch is about to be sent; its number."""
        self._number = batch.number = self._number + 1
        self._batches[batch.number] = batch
        return batch.number

    def cancel(self, call: Call) -> bool:
        """Nobody waits for this call any more; whether the stub has it, and has been told."""
        return any(
            self._cancel(batch, batch.calls.index(call), call)
            for batch in self._batches.values()
            if call in batch.calls
        )

    def _cancel(self, batch: Batch, index: int, call: Call) -> bool:
        self._tell(m.Cancelled(batch.number, index))
        if all(other.finished or other.cancelled or other.withdrawn for other in batch.calls):
            self._questions.abandon(batch.number)
        return True

    def _leave_lane(self, batch: Batch, index: int, call: Call) -> None:
        """The call is under way still, but the lane that it came by is free for others."""
        call.place = _Laneless(self._questions, batch.number)
        call.on_cancel = partial(self._cancel, batch, index)

    # Messages of the stub. Each raises KeyError, IndexError or ValueError if it makes no sense.

    def respond(self, message: m.Respond) -> Action:
        """A response to one of the calls."""
        batch, index = self._batches[message.batch], message.index
        if index < 0 or index in batch.finals:
            raise ValueError(f"a response to request {index}, which is answered or unknown")
        call = batch.calls[index]
        if message.final:
            batch.finals.append(index)
            if batch.late and len(batch.finals) == len(batch.calls):
                self._forget(batch)
        elif not self.decoupled:
            raise ValueError("several responses of a model that is not decoupled")
        answer = self._receive(call, message.response)
        if not message.final and call.on_taken is None:
            request = call.request
            # What lies in the client's memory already has no bytes to be counted here.
            one = request.slots or request.window == 1
            most = 1 if one else min(_TAKEN_COUNT, max(1, self.window // 2))
            call.on_taken = _TakenReporter(self._tell, batch.number, index, most).took
        return partial(call.respond, answer, message.final)

    def conclude(self, messages: Sequence[m.ToHost]) -> Action | None:
        """What nearly all frames are: the only answer of a batch of one call, its end, and maybe
        what the stub gives back.

        It is what `respond` and `done` lead to at a fraction of the price. None for any other
        frame, and nothing has happened then. Raises as they do.
        """
        if len(messages) == 2:
            answer, end = messages
            returned = None
        elif len(messages) == 3:
            answer, end, returned = messages
        else:
            return None
        if (
            type(answer) is not m.Respond
            or type(end) is not m.BatchDone
            or (returned is not None and type(returned) is not m.Return)
        ):
            return None
        batch = self._batches.get(end.batch)
        if (
            batch is None
            or answer.batch != end.batch
            or answer.index
            or not answer.final
            or len(batch.calls) != 1
            or batch.finals
            or batch.free
            or not end.started
            or end.failure is not None
            or end.late
            or end.rescheduled
        ):
            return None
        call = batch.calls[0]
        response = self._receive(call, answer.response)
        if returned is not None:
            self._transfer.returned(returned)
        del self._batches[end.batch]
        times = Times(end.started, end.inputs_ready, end.outputs_begin, end.ended)

        def act() -> None:
            # Whoever waits for the answer does not wait for what is counted.
            try:
                call.computed(times)
                batch.done(times)
                self._free(batch)
            finally:
                try:
                    call.respond(response, True)
                finally:
                    batch.report(batch, times)

        return act

    def _receive(self, call: Call, response: WireResponse | None) -> InferResponse | None:
        if response is None:
            return None
        request = call.request
        answer = InferResponse(request.model_name, self.version, request.id)
        if response.error is not None:
            answer.error = self._transfer.receive_error(response.error)
            call.failed = True
            return answer
        receive, wanted = self._transfer.receive_output, request.slots or request.offers
        try:
            answer.outputs = [receive(output, wanted) for output in response.outputs]
        except HostError as error:
            answer.error = error.with_traceback(None)  # that refers to the answer, and to blocks
            call.failed = True
            return answer
        if self.restore is not None:
            answer.outputs = [self.restore(output) for output in answer.outputs]
        answer.parameters = response.parameters
        call.received(answer)
        if answer.error is not None:
            call.failed = True
        elif request.slots:
            answer.error = deliver(request.slots, answer.outputs)
            call.failed = answer.error is not None
        return answer

    def release(self, message: m.Released) -> Action:
        """The batch goes on as a coroutine."""
        batch = self._batches.get(message.batch)
        if batch is None and 0 < message.batch <= self._number:
            return _nothing  # it has come to its end before this was said
        batch = self._batches[message.batch]
        batch.free = True
        for index, call in enumerate(batch.calls):
            self._leave_lane(batch, index, call)
        return batch.released

    def done(self, message: m.BatchDone) -> tuple[Action, Action, Action]:
        """`execute` has returned: what reports that, what frees the instance, what comes last."""
        batch = self._batches[message.batch]
        if any(index < 0 for index in (*message.late, *message.rescheduled)):
            raise ValueError("the end of a batch, with requests that it does not have")
        if message.failure is not None:
            self._complain(message.failure, batch.calls)
        finals = set(batch.finals)
        late = [index for index in message.late if index not in finals]
        for index in late:
            self._leave_lane(batch, index, batch.calls[index])
        batch.late = late
        if late:
            batch.finals = [index for index in range(len(batch.calls)) if index not in late]
        else:
            self._batches.pop(batch.number)
        # Known before the lane is free: what runs again may be part of the next batch.
        again = [i for i in message.rescheduled if batch.calls[i].reschedule()]
        times = None
        if message.started:  # else everybody had left before it began
            times = Times(
                message.started, message.inputs_ready, message.outputs_begin, message.ended
            )
        return (
            partial(self._end, batch, times),
            partial(self._free, batch),
            partial(self._fail_unanswered, batch, message.rescheduled, again),
        )

    def _end(self, batch: Batch, times: Times | None) -> None:
        for call in batch.calls:
            call.computed(times)
        batch.done(times)
        if times is not None:
            batch.report(batch, times)

    def _free(self, batch: Batch) -> None:
        if not batch.free:
            batch.free = True
            batch.released()
        if self._on_idle is not None:
            self._tell_idle()

    def _fail_unanswered(
        self, batch: Batch, rescheduled: Sequence[int], again: Sequence[int]
    ) -> None:
        for index, call in enumerate(batch.calls):
            if index in batch.late or index in again or call.finished:
                continue
            if call.withdrawn is not None:  # before its batch began
                call.abandon(call.withdrawn)
            elif index in rescheduled:
                self._complain(NOT_RESCHEDULED, [call])
                call.fail(internal(NOT_RESCHEDULED))
            else:
                call.fail(internal(f"instance '{self.name}' ended a batch without answering it"))

    def _complain(self, text: str, calls: Sequence[Call]) -> None:
        self._log(m.LogLine(2, "executor.py", 0, text), calls)

    def unsent(self, batch: Batch) -> None:
        """None of its calls could be sent."""
        now = time.monotonic_ns()
        batch.free = True
        batch.done(Times(now, now, now, now))
        batch.released()

    def takes_ahead(self, call: Call) -> bool:
        """Whether the call may be sent before the stub has ended its batch."""
        return not self.decoupled and self._transfer.takes_no_room(call.request)

    def fail_unstarted(self, reason: str) -> None:
        """Nobody has taken them: there is no other stub to run them."""
        for call in self.take_unstarted():
            call.fail(unavailable(f"{reason} before it had begun with this request."))

    def take_unstarted(self) -> Sequence[Call]:
        """The calls that the stub was sent and had not begun when it went; told once."""
        unstarted, self._unstarted = self._unstarted, []
        return unstarted

    def end(self, reason: str) -> None:
        """The stub is gone: fail what it had begun."""
        begun = self._begun()
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            if batch not in begun:
                self._unstarted += batch.calls
        for batch in begun:
            for call in batch.calls:
                call.fail(unavailable(f"{reason} while it ran this request."))
            if not batch.late:
                self._end(batch, None)
        self._tell_idle()

    def _forget(self, batch: Batch) -> None:
        self._batches.pop(batch.number, None)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self._on_idle is not None and not self._batches:
            self._on_idle()


class _TakenReporter:
    """What the caller of one request has taken and the stub does not know yet."""

    __slots__ = ("_batch", "_bytes", "_count", "_index", "_most", "_tell")

    def __init__(self, tell: Callable[[m.ToStub], None], batch: int, index: int, most: int) -> None:
        self._tell = tell
        self._most = most
        self._batch = batch
        self._index = index
        self._count = self._bytes = 0

    def took(self, response: InferResponse) -> None:
        self._count += 1
        self._bytes += sum(len(output.data) for output in response.outputs)
        if self._count >= self._most or self._bytes >= _TAKEN_BYTES:
            self._tell(m.Taken(self._batch, self._index, self._count))
            self._count = self._bytes = 0


def _nothing() -> None:
    pass


class _Laneless:
    """Where calls are that go on without a lane."""

    __slots__ = ("_batch", "_questions")

    def __init__(self, questions: Questions, batch: int) -> None:
        self._questions = questions
        self._batch = batch

    @property
    def may_wait_for(self) -> Sequence[Sequence[Call]]:
        """What has been asked on their behalf."""
        return [self._questions.of(self._batch)]

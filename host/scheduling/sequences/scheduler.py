"""The scheduler of models with sequences: ids, slots, the backlog (configuration spec 5.1, 5.2)."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from host.errors import HostError, invalid_argument, unavailable
from host.inference.request import Call, FailureReason, Tensor
from host.logs.formats import model_fields
from host.scheduling.clock import Clock, LoopClock
from host.scheduling.gate import Gate, OpenGate
from host.scheduling.scheduler import Lane
from host.scheduling.sequences.call import END, START, Id, Sequence, SequenceCall
from host.scheduling.sequences.controls import Controls
from host.scheduling.sequences.sequence_batch import Cell, Direct, DirectCell, Oldest, OldestCell
from host.scheduling.sequences.states import States
from host.scheduling.sequences.timer import Alarm

_log = logging.getLogger("pbhost")

BACKLOG_HOLD = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
"""Environment variable: how many calls have to be in the backlog before the first batch."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a configuration says about sequences; `idle` in nanoseconds.

    Nothing starts before `hold` calls wait in slots and `backlog_hold` calls in the backlog.
    """

    model: str
    slots: int
    idle: int
    strategy: Direct | Oldest
    controls: Controls
    iterative: bool = False
    outputs: tuple[str, ...] = ()
    states: States | None = None
    hold: int = 0
    backlog_hold: int = 0


class SequenceScheduler:
    """Keeps the requests of a sequence in order, and in one slot of one lane.

    Every operation takes a time that hardly depends on how many sequences are alive.
    """

    def __init__(self, shape: Shape, clock: Clock | None = None) -> None:
        self.lanes: list[Lane] = []
        self.lane_returns: Callable[[], bool] = lambda: False
        self.new_gate: Callable[[Lane, Callable[[], None]], Gate] = lambda lane, again: OpenGate()
        self.clock: Clock = LoopClock() if clock is None else clock
        self.queued = 0
        self._shape = shape
        self._known: dict[Id, Sequence] = {}
        self._cells: dict[Lane, Cell] = {}
        self._free: list[tuple[int, int, Cell]] = []  # a heap; also of cells that have gone
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._backlogged = 0
        self._ends: list[tuple[int, int, Sequence]] = []  # a heap; also of those with a slot
        self._arrivals: OrderedDict[Sequence, int] = OrderedDict()  # the last one, oldest first
        self._alarm = Alarm(self.clock, self._look)
        self.holding = shape.hold > 0 or shape.backlog_hold > 0

    # Requests

    def reserve(self, call: Call) -> None:
        """Calls of sequences are not answered from elsewhere."""

    def refuse(self, call: Call, error: HostError) -> None:
        """End a call that will not run."""
        call.failure_reason = call.failure_reason or FailureReason.OTHER
        call.fail(error)

    def submit(self, call: Call) -> None:
        """Queue a call in its sequence. Raises HostError if it belongs to none."""
        assert isinstance(call, SequenceCall)
        shape, request = self._shape, call.request
        if request.batch_size > 1:
            raise invalid_argument(
                f"inference request to model '{shape.model}' must specify batch-size 1 due to"
                " requirements of sequence batcher"
            )
        if not request.correlation_id:
            if not shape.iterative:
                raise invalid_argument(
                    f"inference request to model '{shape.model}' must specify a non-zero or"
                    " non-empty correlation ID"
                )
            request.correlation_id = next(n for n in self._ids if n not in self._known)
            request.flags |= START
        call.iterates = shape.iterative
        self._enqueue(call)

    def _enqueue(self, call: SequenceCall) -> None:
        request = call.request
        sequence = self._known.get(request.correlation_id)
        if sequence is None and not request.flags & START:
            raise invalid_argument(
                f"inference request for sequence {request.correlation_id} to model"
                f" '{self._shape.model}' must specify the START flag on the first request of the"
                " sequence"
            )
        if sequence is None:
            sequence = self._begin(request.correlation_id)
        elif request.flags & START:
            _log.warning(
                "sequence %s starts again although it has not ended", sequence.id,
                extra=model_fields(self._shape.model, request.model_version),
            )  # fmt: skip
        self._wait(call, sequence)
        if request.flags & END:
            self._forget(sequence)
            sequence.ending = True
        else:
            self._arrivals[sequence] = self.clock.now()
            self._arrivals.move_to_end(sequence)
            sequence.overdue = False
            self._alarm.set(self._arrivals[next(iter(self._arrivals))] + self._shape.idle)
        if isinstance(sequence.cell, Cell):
            if not self._let_go():
                sequence.cell.wake(sequence.number)
        else:
            self._set_deadline(call, sequence)
            self._let_go()

    def _begin(self, correlation_id: Id) -> Sequence:
        sequence = self._known[correlation_id] = Sequence(correlation_id)
        while self._free:
            number, _, cell = heapq.heappop(self._free)
            if self._cells.get(cell.lane) is cell and not cell.retired:
                cell.take(sequence, number)
                return sequence
        self._backlog[sequence] = None
        return sequence

    def _wait(self, call: SequenceCall, sequence: Sequence) -> None:
        call.sequence = sequence
        call.on_cancel = self._cancelled
        call.holder = self if sequence.cell is None else sequence.cell
        sequence.calls.append(call)
        self.queued += 1
        if sequence.cell is None:
            self._backlogged += 1

    def _set_deadline(self, call: SequenceCall, sequence: Sequence) -> None:
        timeout = call.request.timeout_us
        if timeout > 0:
            end = self.clock.now() + timeout * 1000 + 1
            heapq.heappush(self._ends, (end, next(self._numbers), sequence))
            self._alarm.set(end)

    def _let_go(self) -> bool:
        """End the holding if enough has come; whether that has started what could be."""
        if not self.holding:
            return False
        shape = self._shape
        in_slots = self.queued - self._backlogged
        if in_slots < shape.hold or self._backlogged < shape.backlog_hold:
            return False
        self.holding = False
        for cell in list(self._cells.values()):
            cell.dispatch()
        return True

    def _cancelled(self, call: Call) -> None:
        """A call that waits has been cancelled; its sequence ends when its turn would come."""
        assert isinstance(call, SequenceCall) and call.sequence is not None
        sequence = call.sequence
        call.on_cancel = None
        call.failure_reason = call.failure_reason or FailureReason.OTHER
        self.left(call)
        if sequence.cell is None:
            self._backlogged -= 1
        elif sequence.calls and sequence.calls[0] is call:
            self.kill(sequence)
            assert isinstance(sequence.cell, Cell)
            sequence.cell.release(sequence.number)

    # Sequences

    def _forget(self, sequence: Sequence) -> None:
        if self._known.get(sequence.id) is sequence:
            del self._known[sequence.id]
        self._arrivals.pop(sequence, None)

    def _expire(self, sequence: Sequence) -> None:
        """No more requests come; the slot is free when there are none left."""
        self._forget(sequence)
        if not sequence.ending:
            sequence.ending = True
            cell = sequence.cell
            if isinstance(cell, Cell) and not sequence.calls:
                cell.release(sequence.number)

    def kill(self, sequence: Sequence, error: HostError | None = None) -> None:
        """Forget a sequence and end what waits in it, with that error or as cancelled."""
        self._forget(sequence)
        calls = list(sequence.calls)
        sequence.calls.clear()
        sequence.dead = True
        for call in calls:
            if call.finished or call.cancelled:
                continue
            call.on_cancel = None
            self.left(call)
            if sequence.cell is None:
                self._backlogged -= 1
            if error is None:
                call.cancel()
            else:
                self.refuse(call, error)

    def ran(self, call: SequenceCall) -> None:
        """The model has released a call: it runs again, or may be the last one of its kind."""
        sequence = call.sequence
        if not self._shape.iterative or sequence is None:
            return
        again, call.again = call.again, False
        if again and not call.finished:
            call.request.flags = 0
            call.queued_ns = self.clock.now()
            call.on_response_acknowledged = None
            try:
                self._enqueue(call)
            except HostError as error:
                self.refuse(call, error)
        elif self._known.get(sequence.id) is sequence:
            self._expire(sequence)

    def slot_free(self, cell: Cell, number: int) -> None:
        """Give a slot to the sequence that has waited longest."""
        if self._cells.get(cell.lane) is not cell:
            return
        if cell.retired:
            cell.tell_if_empty()
            return
        while self._backlog:
            sequence = self._backlog.popitem(last=False)[0]
            if any(call.cancelled for call in sequence.calls):
                self.kill(sequence)
                continue
            self._backlogged -= len(sequence.calls)
            cell.take(sequence, number)
            if sequence.overdue:
                self._expire(sequence)
            cell.wake(number)
            return
        heapq.heappush(self._free, (number, next(self._numbers), cell))

    def _look(self) -> None:
        """Time has passed: some sequences may have waited, or been idle, for too long."""
        now = self.clock.now()
        while self._ends and self._ends[0][0] <= now:
            sequence = heapq.heappop(self._ends)[2]
            if sequence in self._backlog:
                self._time_out(sequence)
        while self._arrivals:
            sequence, last = next(iter(self._arrivals.items()))
            if last + self._shape.idle > now:
                self._alarm.set(last + self._shape.idle)
                break
            if sequence.cell is None:
                del self._arrivals[sequence]
                sequence.overdue = True
            else:
                self._expire(sequence)
        if self._ends:
            self._alarm.set(self._ends[0][0])

    def _time_out(self, sequence: Sequence) -> None:
        del self._backlog[sequence]
        for call in sequence.calls:
            call.failure_reason = call.failure_reason or FailureReason.REJECTED
        error = unavailable("timeout of the corresponding sequence has been expired")
        self.kill(sequence, error)

    # Extra tensors

    def equip(self, call: SequenceCall) -> None:
        """Add controls and states to a call that is about to run."""
        shape, request, sequence = self._shape, call.request, call.sequence
        extra = shape.controls.of(request.flags, request.correlation_id)
        if shape.states is None or sequence is None:
            call.equip(extra, (), {}, {})
            return
        if sequence.states is None or request.flags & START:
            sequence.states = shape.states.fresh()
        states = sequence.states
        call.equip([*extra, *states.values()], shape.outputs, shape.states.kept, states)

    def padding(self) -> list[Tensor]:
        """The extra tensors of a row without a request."""
        states = self._shape.states
        fresh = [] if states is None else states.fresh().values()
        return [*self._shape.controls.padding(), *fresh]

    # Lanes

    def left(self, call: Call) -> None:
        """A call does not wait any more."""
        self.queued -= 1

    def lane_free(self, lane: Lane) -> None:
        """The lane has released its batch, or is new."""
        cell = self._cells.get(lane)
        if cell is not None:
            cell.freed()
            return
        if lane not in self.lanes:
            self.lanes.append(lane)
        shape = self._shape
        gate = self.new_gate(lane, lambda: self._again(lane))
        if isinstance(shape.strategy, Direct):
            cell = DirectCell(self, lane, shape.slots, gate, shape.strategy)
        else:
            cell = OldestCell(self, lane, shape.slots, gate, shape.strategy)
        self._cells[lane] = cell
        for number in range(shape.slots):
            self.slot_free(cell, number)
        self._let_go()

    def _again(self, lane: Lane) -> None:
        """The lane may have what it waited for."""
        cell = self._cells.get(lane)
        if isinstance(cell, OldestCell):
            cell.again()
        elif cell is not None:
            cell.dispatch()

    def retire(self, lane: Lane, then: Callable[[], None]) -> None:
        """No new sequences for the lane; call back when its last one has ended, or the lane has."""
        cell = self._cells.get(lane)
        if cell is None:
            then()
            return
        self.lanes.remove(lane)
        cell.retired = True
        cell.on_empty = then
        cell.tell_if_empty()

    def lane_gone(self, lane: Lane) -> None:
        """The sequences of the lane have lost their places: they are ended with an error."""
        if lane in self.lanes:
            self.lanes.remove(lane)
        cell = self._cells.pop(lane, None)
        if cell is not None:
            for sequence in cell.close():
                self.kill(sequence, self.lost(sequence))
            cell.tell_if_empty()

    def lost(self, sequence: Sequence) -> HostError:
        """What those hear whose sequence has lost its slot."""
        return unavailable(
            f"sequence {sequence.id} of model '{self._shape.model}' has ended, for its instance"
            " has; start it again"
        )

    def fail_queued(self, error: HostError) -> None:
        """Answer every call that has not started, and forget their sequences."""
        while self._backlog:
            self.kill(self._backlog.popitem(last=False)[0], error)
        for cell in list(self._cells.values()):
            for number, sequence in enumerate(list(cell.slots)):
                if sequence is not None and sequence.calls:
                    self.kill(sequence, error)
                    cell.release(number)
            cell.fail_waiting(error)


def backlog_hold_from_environment() -> int:
    """The value of `TRITONSERVER_BACKLOG_DELAY_SCHEDULER`, 0 if not set. Raises HostError."""
    text = os.environ.get(BACKLOG_HOLD, "0")
    if not text.isdecimal():
        raise invalid_argument(
            f"environment variable {BACKLOG_HOLD} must be a whole number of requests, got '{text}'"
        )
    return int(text)

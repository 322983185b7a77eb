"""The slots of one lane: which sequences have their places there, and what runs next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from host.errors import HostError
from host.inference.request import Call, CancelCallback, FailureReason, InferRequest, Tensor
from host.scheduling.clock import Clock
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.gate import Gate
from host.scheduling.scheduler import Lane
from host.scheduling.sequences.call import END, Padding, Sequence, SequenceCall
from host.scheduling.sequences.timer import Alarm


class Owner(Protocol):
    """What a cell needs of its scheduler."""

    clock: Clock
    lane_returns: Callable[[], bool]

    @property
    def holding(self) -> bool:
        """Whether nothing may start yet."""

    def equip(self, call: SequenceCall) -> None:
        """Add the model's extra tensors to a call that is about to run."""

    def padding(self) -> list[Tensor]:
        """The extra tensors of a row without a request."""

    def lost(self, sequence: Sequence) -> HostError:
        """What those hear whose sequence has lost its slot."""

    def left(self, call: Call) -> None:
        """A call does not wait any more."""

    def kill(self, sequence: Sequence) -> None:
        """Cancel what waits in a sequence, and forget it."""

    def slot_free(self, cell: Cell, number: int) -> None:
        """A slot has no sequence."""

    def ran(self, call: SequenceCall) -> None:
        """The model has released a call."""


class Cell(ABC):
    """`count` slots of `lane`; at most one batch runs. Both strategies go on from here."""

    def __init__(self, owner: Owner, lane: Lane, count: int, gate: Gate) -> None:
        self.lane = lane
        self.lanes = [lane]  # those that a call in a slot waits for
        self.lane_returns = owner.lane_returns
        self.slots: list[Sequence | None] = [None] * count
        self.busy = False
        self.retired = False  # no new sequences come
        self.on_empty: Callable[[], None] | None = None  # who is to know when the last one ends
        self.gate = gate
        self._owner = owner
        self._batch: abc.Sequence[Call] = ()

    def take(self, sequence: Sequence, number: int) -> None:
        """The sequence has this slot from now on."""
        self.slots[number] = sequence
        sequence.cell, sequence.number = self, number
        for call in sequence.calls:
            call.holder = self

    @abstractmethod
    def wake(self, number: int) -> None:
        """There may be something to do for a slot."""

    @abstractmethod
    def dispatch(self) -> None:
        """Start what can be started."""

    def freed(self) -> None:
        """The lane has released its batch."""
        batch, self._batch = self._batch, ()
        for call in batch:  # while it is busy: those that come back may go together
            if isinstance(call, SequenceCall):
                call.strip()
                self._owner.ran(call)
        self.busy = False
        self._go_on(batch)
        self.tell_if_empty()

    @property
    def empty(self) -> bool:
        """Whether there is no sequence, and nothing runs."""
        return not self.busy and all(sequence is None for sequence in self.slots)

    def tell_if_empty(self) -> None:
        """Tell whoever waits for that, once."""
        if self.on_empty is not None and self.empty:
            told, self.on_empty = self.on_empty, None
            told()

    def _go_on(self, batch: Iterable[Call]) -> None:
        self.dispatch()

    @abstractmethod
    def fail_waiting(self, error: HostError) -> None:
        """Answer the calls that are not in a slot any more and have not started."""

    def close(self) -> list[Sequence]:
        """The lane is gone: whose slots these were."""
        self.gate.gone(self.lane)
        ended = [sequence for sequence in self.slots if sequence is not None]
        ended += [s for call in self._batch if (s := getattr(call, "sequence", None)) is not None]
        self.slots = [None] * len(self.slots)
        self.busy = False
        return ended

    def release(self, number: int) -> None:
        """The sequence of the slot has come to its end."""
        self.slots[number] = None
        self._owner.slot_free(self, number)

    def head(self, number: int) -> SequenceCall | None:
        """The next call of a slot. A sequence with a cancelled one comes to its end here."""
        while True:
            sequence = self.slots[number]
            if sequence is None or not sequence.calls:
                return None
            call = sequence.calls[0]
            if not call.finished:
                return call
            self._owner.kill(sequence)
            self.release(number)

    def pop(self, number: int) -> SequenceCall:
        """Take the head of a slot; with the last one, the slot is free."""
        sequence = self.slots[number]
        assert sequence is not None
        call = sequence.calls.popleft()
        if call.request.flags & END or (sequence.ending and not sequence.calls):
            self.release(number)
        return call

    def start(self, batch: list[Call]) -> None:
        """Run a batch; from here on its calls belong to the lane."""
        self._batch = batch
        self.busy = True
        for call in batch:
            if isinstance(call, SequenceCall):
                self._owner.left(call)
                self._owner.equip(call)
            call.holder, call.on_cancel = self.lane, self.lane.cancel
        self.lane.run(batch)


@dataclass(frozen=True, slots=True)
class Direct:
    """The direct strategy: `delay` in nanoseconds counts if `utilization` is more than 0."""

    compatible: Callable[[Call, Call], bool]
    utilization: float = 0.0
    delay: int = 0


class DirectCell(Cell):
    """Row i of a batch is slot i, whether or not there is a request (configuration spec 5.4)."""

    def __init__(self, owner: Owner, lane: Lane, count: int, gate: Gate, strategy: Direct) -> None:
        super().__init__(owner, lane, count, gate)
        self._strategy = strategy
        self._alarm = Alarm(owner.clock, self.dispatch)

    def wake(self, number: int) -> None:
        """Something has come to a slot."""
        self.dispatch()

    def close(self) -> list[Sequence]:
        """The lane is gone: whose slots these were."""
        self._alarm.stop()
        return super().close()

    def dispatch(self) -> None:
        """Run one request of each slot, if it is time."""
        if self.busy or self._owner.holding:
            return
        self.busy = True  # slots that become free meanwhile are for the next batch
        rows = self._form()
        self.busy = False
        if rows:
            self.start(rows)

    def fail_waiting(self, error: HostError) -> None:
        """What is not in a slot any more has started."""

    def _form(self) -> list[Call]:
        ready = [(n, call) for n in range(len(self.slots)) if (call := self.head(n)) is not None]
        if not ready or not self._is_due([call for _, call in ready]):
            return []
        if self.gate.take([self.lane]) is None:
            return []
        return list(self._rows(ready))

    def _is_due(self, ready: list[SequenceCall]) -> bool:
        strategy = self._strategy
        if not strategy.utilization or not strategy.delay:
            return True
        if len(ready) / len(self.slots) >= strategy.utilization:
            return True
        due = min(call.queued_ns for call in ready) + strategy.delay
        if self._owner.clock.now() >= due:
            return True
        self._alarm.set(due)
        return False

    def _rows(self, ready: list[tuple[int, SequenceCall]]) -> Iterator[Call]:
        first = ready[0][1]
        model = [Tensor(t.name, t.datatype, t.shape, bytes(_size(t))) for t in first.request.inputs]
        calls = dict(ready)
        for number in range(ready[-1][0] + 1):
            call = calls.get(number)
            if call is not None and (call is first or self._strategy.compatible(first, call)):
                yield self.pop(number)
            else:
                yield self._padding(first.request, model)

    def _padding(self, like: InferRequest, inputs: list[Tensor]) -> Padding:
        copies = [Tensor(t.name, t.datatype, t.shape, t.data) for t in inputs]
        request = InferRequest(
            like.model_name,
            [*copies, *self._owner.padding()],
            like.model_version,
            requested_outputs=[],
            batch_size=like.batch_size,
        )
        return Padding(request)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor of this form; elements of BYTES are empty ones."""
    if tensor.datatype != "BYTES":
        return len(tensor.data)
    elements = 1
    for dim in tensor.shape:
        elements *= dim
    return 4 * elements


@dataclass(frozen=True, slots=True)
class Oldest:
    """The oldest strategy: `batches` makes the scheduler of one lane's batches."""

    batches: Callable[[], DynamicScheduler]


class OldestCell(Cell):
    """One request of each slot at a time is a candidate for a batch (configuration spec 5.5)."""

    def __init__(self, owner: Owner, lane: Lane, count: int, gate: Gate, strategy: Oldest) -> None:
        super().__init__(owner, lane, count, gate)
        self._inner = strategy.batches()
        self._inner.gate = _InnerGate(gate, lane)
        self._flying: dict[SequenceCall, int] = {}
        """What was handed on and is not released, and the slots it came from."""
        self._occupied: set[int] = set()
        self._inner.lane_free(self)

    # The lane of the inner scheduler

    def run(self, calls: abc.Sequence[Call]) -> None:
        """Run a batch that the inner scheduler has made."""
        self.start(list(calls))

    def cancel(self, call: Call) -> bool:
        """As the lane says."""
        return self.lane.cancel(call)

    @property
    def waiting_for(self) -> abc.Sequence[Call]:
        """As the lane says."""
        return self.lane.waiting_for

    @property
    def may_wait_for(self) -> abc.Sequence[abc.Sequence[Call]]:
        """As the lane says."""
        return self.lane.may_wait_for

    # Slots

    def wake(self, number: int) -> None:
        """Hand the next call of a slot on, if none is under way."""
        while number not in self._occupied and not self._owner.holding:
            if self.head(number) is None:
                return
            self._occupied.add(number)
            call = self.pop(number)
            self._flying[call] = number
            self._inner.submit(call)
            if call.holder is self._inner:
                call.holder = self
                assert call.on_cancel is not None
                call.on_cancel = partial(self._cancelled, call.on_cancel)

    def dispatch(self) -> None:
        """Hand on what can be handed on, and run what is due."""
        for number in range(len(self.slots)):
            self.wake(number)
        self._inner.dispatch()

    @property
    def empty(self) -> bool:
        """Whether there is no sequence, and nothing has been handed on."""
        return super().empty and not self._occupied

    def again(self) -> None:
        """The lane may have what it waited for."""
        self._inner.dispatch()

    def _cancelled(self, withdraw: CancelCallback, call: Call) -> None:
        withdraw(call)
        self._owner.left(call)
        self._land(call)

    def _land(self, call: Call) -> None:
        number = self._flying.pop(call, None) if isinstance(call, SequenceCall) else None
        if number is not None:
            self._occupied.discard(number)
            self.wake(number)
            self.tell_if_empty()

    def accepts_prefetch(self, call: Call, ahead: int) -> bool:
        """It is free again as soon as it has handed a batch on."""
        return False

    def drain_prefetched(self) -> abc.Sequence[Call]:
        """Nothing is sent ahead."""
        return ()

    def _go_on(self, batch: Iterable[Call]) -> None:
        for call in batch:
            self._land(call)
        self._inner.lane_free(self)

    def close(self) -> list[Sequence]:
        """The lane is gone: whose slots these were."""
        ended = super().close()
        for call in list(self._flying):
            sequence = call.sequence
            if sequence is not None:
                self._abandon(call, self._owner.lost(sequence))
                ended.append(sequence)
        self._inner.lane_gone(self)
        self._occupied.clear()
        return ended

    def fail_waiting(self, error: HostError) -> None:
        """Answer the calls that have been handed on and have not started."""
        for call in list(self._flying):
            if call.sequence is not None and self._abandon(call, error):
                self._owner.kill(call.sequence)

    def _abandon(self, call: SequenceCall, error: HostError) -> bool:
        waits = call.holder is self and not call.finished
        if waits:
            call.failure_reason = FailureReason.OTHER
            call.abort(error)
        return waits


class _InnerGate:
    """The gate of the inner scheduler, whose lane stands for another one."""

    def __init__(self, gate: Gate, lane: Lane) -> None:
        self._gate = gate
        self._lane = lane

    def take(self, free: list[Lane]) -> Lane | None:
        """The only lane, once it may run."""
        return free.pop() if self._gate.take([self._lane]) is not None else None

    def idle(self) -> None:
        """There is nothing to run."""
        self._gate.idle()

    def gone(self, lane: Lane) -> None:
        """It is not free any more."""
        self._gate.gone(self._lane)

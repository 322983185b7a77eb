"""The slots of one instance: the sequences in them, and the next batch."""

from __future__ import annotations

from abc import abstractmethod
from collections import abc
from collections.abc import Callable, Iterable
from typing import Protocol

from host.errors import HostError
from host.inference.call import Call
from host.inference.request import Tensor
from host.scheduling.queue import ExecutionGate
from host.scheduling.scheduler import Clock, InstanceSlot
from host.scheduling.sequence_call import END, Sequence, SequenceCall, SlotHolder


class SequenceBatchOwner(Protocol):
    """What a sequence batch needs of its scheduler."""

    clock: Clock
    may_recover: Callable[[], bool]

    @property
    def holding(self) -> bool:
        """Whether nothing may start yet."""

    def add_controls_and_states(self, call: SequenceCall) -> None:
        """Adds controls and states to a call that is about to run."""

    def padding_tensors(self) -> list[Tensor]:
        """The extra tensors of a row without a request."""

    def slot_lost_error(self, sequence: Sequence) -> HostError:
        """The error for a sequence that has lost its slot."""

    def cancel_call(self, call: Call) -> bool:
        """Withdraws a call that waits in a slot or in the backlog; returns False."""

    def call_dequeued(self, call: Call) -> None:
        """Called when a call is no longer queued."""

    def end_sequence(self, sequence: Sequence) -> None:
        """Cancels the queued calls of a sequence and removes it."""

    def slot_free(self, sequence_batch: SequenceBatch, number: int) -> None:
        """Called when a slot has no sequence."""

    def call_released(self, call: SequenceCall) -> None:
        """Called when the model has released a call."""


class SequenceBatch(SlotHolder):
    """`count` slots of `instance`, which runs one batch at a time. Base of both strategies."""

    def __init__(
        self, owner: SequenceBatchOwner, instance: InstanceSlot, count: int, gate: ExecutionGate
    ) -> None:
        self.instance = instance
        self.instances = [instance]  # a call in a slot waits for this one
        self.may_recover = owner.may_recover
        self.slots: list[Sequence | None] = [None] * count
        self.busy = False
        self.retired = False  # gets no new sequences
        self.on_empty: Callable[[], None] | None = None  # called when the last sequence has ended
        self.gate = gate
        self._owner = owner
        self._batch: abc.Sequence[Call] = ()
        self._expired: list[Sequence] = []  # they left their slots, and the model was not told yet

    def assign_slot(self, sequence: Sequence, number: int) -> None:
        """Gives the slot to a sequence."""
        self.slots[number] = sequence
        sequence.sequence_batch, sequence.number = self, number
        for call in sequence.calls:
            call.holder = self

    def cancel_call(self, call: Call) -> bool:
        """Withdraws a call that waits in its slot."""
        return self._owner.cancel_call(call)

    @abstractmethod
    def dispatch(self) -> None:
        """Starts what can be started."""

    def resources_granted(self) -> None:
        """Called when the resources that the instance waited for may be free."""
        self.dispatch()

    def instance_ready(self) -> None:
        """Called when the instance has released its batch."""
        batch, self._batch = self._batch, ()
        for call in batch:  # still busy, so that calls that run again may go together
            if isinstance(call, SequenceCall):
                call.remove_controls_and_states()
                self._owner.call_released(call)
                if call.failed:
                    self._note_failed_end(call)
        self.busy = False
        self._after_batch(batch)
        self.report_expired()
        self.signal_if_empty()

    @property
    def empty(self) -> bool:
        """Whether there is no sequence and nothing runs."""
        return not self.busy and all(sequence is None for sequence in self.slots)

    def signal_if_empty(self) -> None:
        """Calls `on_empty`, once."""
        if self.on_empty is not None and self.empty:
            told, self.on_empty = self.on_empty, None
            told()

    def _after_batch(self, batch: Iterable[Call]) -> None:
        self.dispatch()

    @abstractmethod
    def fail_waiting(self, error: HostError) -> None:
        """Fails calls that have left their slot and have not started."""

    def close(self) -> list[Sequence]:
        """Returns the sequences of the slots, as the instance is gone."""
        self.gate.instance_removed(self.instance)
        ended = [sequence for sequence in self.slots if sequence is not None]
        ended += [s for call in self._batch if (s := getattr(call, "sequence", None)) is not None]
        self.slots = [None] * len(self.slots)
        self.busy = False
        return ended

    def release_slot(self, number: int) -> None:
        """Frees a slot whose sequence has ended."""
        sequence, self.slots[number] = self.slots[number], None
        if sequence is not None and sequence.expired:
            self._expired.append(sequence)
        self._owner.slot_free(self, number)

    def _note_failed_end(self, call: SequenceCall) -> None:
        """Notes a sequence whose END has failed, as the model may not have seen it."""
        if call.request.flags & END and call.sequence is not None:
            self._expired.append(call.sequence)

    def report_expired(self) -> None:
        """Tells the model which sequences have ended without an END, once no batch runs."""
        if self._expired and not self.busy:
            self._report_expired(())

    def _report_expired(self, batch: Iterable[Call]) -> None:
        """Reports sequences before a batch; those with a call that has to run are reported later.

        Sequences whose id has started again are not reported: the model would take them for their
        successors.
        """
        calls = [*batch, *self._calls_passed_on()]
        waiting = {call.sequence for call in calls if isinstance(call, SequenceCall)}
        started = {sequence.id for sequence in (*self.slots, *waiting) if sequence is not None}
        expired = [s for s in self._expired if s not in waiting]
        self._expired = [s for s in self._expired if s in waiting]
        ids = list(dict.fromkeys(s.id for s in expired if s.id not in started))
        if ids:
            self.instance.report_expired_sequences(ids)

    def _calls_passed_on(self) -> Iterable[SequenceCall]:
        """The calls that have left their slots and are not in a batch yet."""
        return ()

    def next_call(self, number: int) -> SequenceCall | None:
        """The next call of a slot; a sequence whose next call was cancelled ends here."""
        while True:
            sequence = self.slots[number]
            if sequence is None or not sequence.calls:
                return None
            call = sequence.calls[0]
            if not call.finished:
                return call
            sequence.expired = True
            self._owner.end_sequence(sequence)
            self.release_slot(number)

    def pop_call(self, number: int) -> SequenceCall:
        """Takes the next call of a slot; with the last one, the slot is free."""
        sequence = self.slots[number]
        assert sequence is not None
        call = sequence.calls.popleft()
        if call.request.flags & END or (sequence.ending and not sequence.calls):
            self.release_slot(number)
        return call

    def start_batch(self, batch: list[Call]) -> None:
        """Runs a batch; from here on the instance holds its calls."""
        if self._expired:
            self._report_expired(batch)
        self._batch = batch
        self.busy = True
        for call in batch:
            if isinstance(call, SequenceCall):
                self._owner.call_dequeued(call)
                self._owner.add_controls_and_states(call)
            call.holder = self.instance
        self.instance.run(batch)

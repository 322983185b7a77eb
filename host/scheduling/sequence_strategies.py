"""The strategies of the sequence batcher: direct and oldest.

Source: docs/reference/scheduling.md, "Direct strategy" and "Oldest strategy".
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator

from host.errors import HostError
from host.inference.call import Call, FailureReason
from host.inference.request import InferRequest, Tensor
from host.scheduling.dynamic import CanShareBatch, DynamicScheduler
from host.scheduling.queue import ExecutionGate
from host.scheduling.scheduler import CoalescingTimer, InstanceSlot
from host.scheduling.sequence_batch import SequenceBatch, SequenceBatchOwner
from host.scheduling.sequence_call import PaddingCall, Sequence, SequenceCall


class DirectSequenceBatch(SequenceBatch):
    """The direct strategy: row i of a batch is slot i, with or without a request.

    `delay`: nanoseconds, used if `utilization` is more than 0.
    """

    def __init__(
        self,
        owner: SequenceBatchOwner,
        instance: InstanceSlot,
        count: int,
        gate: ExecutionGate,
        *,
        compatible: CanShareBatch,
        utilization: float,
        delay: int,
    ) -> None:
        super().__init__(owner, instance, count, gate)
        self._compatible = compatible
        self._utilization = utilization
        self._delay = delay
        self._alarm = CoalescingTimer(owner.clock, self.dispatch)

    def slot_ready(self, number: int) -> None:
        """Called when a slot has a call to run."""
        self.dispatch()

    def close(self) -> list[Sequence]:
        """Returns the sequences of the slots, as the instance is gone."""
        self._alarm.cancel()
        return super().close()

    def dispatch(self) -> None:
        """Runs one request of each slot, if it is time."""
        if self.busy or self._owner.holding:
            return
        self.busy = True  # slots that become free meanwhile are for the next batch
        rows = self._form_batch()
        self.busy = False
        if rows:
            self.start_batch(rows)

    def fail_waiting(self, error: HostError) -> None:
        """Does nothing: calls that have left their slot have started."""

    def _form_batch(self) -> list[Call]:
        ready = [
            (n, call) for n in range(len(self.slots)) if (call := self.next_call(n)) is not None
        ]
        if not ready or not self._is_due([call for _, call in ready]):
            return []
        if self.gate.acquire_instance([self.instance]) is None:
            return []
        return list(self._rows(ready))

    def _is_due(self, ready: list[SequenceCall]) -> bool:
        if not self._utilization or not self._delay:
            return True
        if len(ready) / len(self.slots) >= self._utilization:
            return True
        due = min(call.queued_ns for call in ready) + self._delay
        if self._owner.clock.now() >= due:
            return True
        self._alarm.schedule(due)
        return False

    def _rows(self, ready: list[tuple[int, SequenceCall]]) -> Iterator[Call]:
        first = ready[0][1]
        model = [
            Tensor(t.name, t.datatype, t.shape, bytes(_byte_size(t))) for t in first.request.inputs
        ]
        calls = dict(ready)
        for number in range(ready[-1][0] + 1):
            call = calls.get(number)
            if call is not None and (call is first or self._compatible(first, call)):
                yield self.pop_call(number)
            else:
                yield self._padding(first.request, model)

    def _padding(self, like: InferRequest, inputs: list[Tensor]) -> PaddingCall:
        copies = [Tensor(t.name, t.datatype, t.shape, t.data) for t in inputs]
        request = InferRequest(
            like.model_name,
            [*copies, *self._owner.padding_tensors()],
            like.model_version,
            requested_outputs=[],
            batch_size=like.batch_size,
        )
        return PaddingCall(request)


def _byte_size(tensor: Tensor) -> int:
    """Bytes of a tensor of this shape; elements of BYTES are empty ones."""
    if tensor.datatype != "BYTES":
        return len(tensor.data)
    elements = 1
    for dim in tensor.shape:
        elements *= dim
    return 4 * elements


class OldestSequenceBatch(SequenceBatch, InstanceSlot):
    """The oldest strategy: one request of each slot at a time is a candidate for a batch.

    `inner`: forms the batches of the instance.
    """

    def __init__(
        self,
        owner: SequenceBatchOwner,
        instance: InstanceSlot,
        count: int,
        gate: ExecutionGate,
        inner: DynamicScheduler,
    ) -> None:
        super().__init__(owner, instance, count, gate)
        self._inner = inner
        self._inner.gate = _InnerGate(gate, instance)
        self._in_flight: dict[SequenceCall, int] = {}
        """Calls that were passed on and are not released, with their slots."""
        self._occupied: set[int] = set()
        self._inner.instance_ready(self)

    # As the instance of the inner scheduler

    def run(self, calls: abc.Sequence[Call]) -> None:
        """Runs a batch of the inner scheduler."""
        self.start_batch(list(calls))

    @property
    def blocking_calls(self) -> abc.Sequence[Call]:
        """As the instance."""
        return self.instance.blocking_calls

    @property
    def awaited_models(self) -> abc.Collection[str]:
        """As the instance."""
        return self.instance.awaited_models

    @property
    def potentially_blocking_calls(self) -> abc.Sequence[abc.Sequence[Call]]:
        """As the instance."""
        return self.instance.potentially_blocking_calls

    # Slots

    def slot_ready(self, number: int) -> None:
        """Passes the next call of a slot on, unless one is in progress."""
        while number not in self._occupied and not self._owner.holding:
            if self.next_call(number) is None:
                return
            self._occupied.add(number)
            call = self.pop_call(number)
            self._in_flight[call] = number
            self._inner.submit(call)
            if call.holder is self._inner:
                call.holder = self

    def dispatch(self) -> None:
        """Passes on what can be passed on, and runs what is due."""
        for number in range(len(self.slots)):
            self.slot_ready(number)
        self._inner.dispatch()

    @property
    def empty(self) -> bool:
        """Whether there is no sequence and no call was passed on."""
        return super().empty and not self._occupied

    def resources_granted(self) -> None:
        """As the base class; calls that were passed on wait for them."""
        self._inner.dispatch()

    def cancel_call(self, call: Call) -> bool:
        """Withdraws a call that waits in its slot, or in the inner scheduler."""
        if not isinstance(call, SequenceCall) or call not in self._in_flight:
            return super().cancel_call(call)
        self._inner.cancel_call(call)
        self._owner.call_dequeued(call)
        self._note_failed_end(call)
        self._call_finished(call)
        self.report_expired()
        return False

    def _calls_passed_on(self) -> Iterable[SequenceCall]:
        """The calls that were passed on and are not released."""
        return self._in_flight

    def _call_finished(self, call: Call) -> None:
        number = self._in_flight.pop(call, None) if isinstance(call, SequenceCall) else None
        if number is not None:
            self._occupied.discard(number)
            self.slot_ready(number)
            self.signal_if_empty()

    def drain_prefetched(self) -> abc.Sequence[Call]:
        """Returns nothing."""
        return ()

    def _after_batch(self, batch: Iterable[Call]) -> None:
        for call in batch:
            self._call_finished(call)
        self._inner.instance_ready(self)

    def close(self) -> list[Sequence]:
        """Returns the sequences of the slots, as the instance is gone."""
        ended = super().close()
        for call in list(self._in_flight):
            sequence = call.sequence
            if sequence is not None:
                self._fail_call(call, self._owner.slot_lost_error(sequence))
                ended.append(sequence)
        self._inner.instance_removed(self)
        self._occupied.clear()
        return ended

    def fail_waiting(self, error: HostError) -> None:
        """Fails calls that were passed on and have not started."""
        for call in list(self._in_flight):
            if call.sequence is not None and self._fail_call(call, error):
                self._owner.end_sequence(call.sequence)

    def _fail_call(self, call: SequenceCall, error: HostError) -> bool:
        waits = call.holder is self and not call.finished
        if waits:
            call.failure_reason = FailureReason.OTHER
            call.abort(error)
        return waits


class _InnerGate:
    """The gate of the inner scheduler, whose only instance stands for the real one."""

    def __init__(self, gate: ExecutionGate, instance: InstanceSlot) -> None:
        self._gate = gate
        self._instance = instance

    def acquire_instance(self, free: list[InstanceSlot]) -> InstanceSlot | None:
        """The only instance, once the outer gate allows it."""
        return free.pop() if self._gate.acquire_instance([self._instance]) is not None else None

    def queue_empty(self) -> None:
        """As the outer gate."""
        self._gate.queue_empty()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Tells the outer gate about the real instance."""
        self._gate.instance_removed(self._instance)

"""The direct strategy of sequences: row i of a batch is slot i of the instance.

Source: docs/reference/configuration-and-scheduling.md, "Direct strategy".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from host.errors import HostError
from host.inference.call import Call
from host.inference.request import InferRequest, Tensor
from host.scheduling.gate import ExecutionGate
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.sequences.call import PaddingCall, Sequence, SequenceCall
from host.scheduling.sequences.sequence_batch import SequenceBatch, SequenceBatchOwner
from host.scheduling.sequences.timer import CoalescingTimer


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """The direct strategy. `delay`: nanoseconds, used if `utilization` is more than 0."""

    compatible: Callable[[Call, Call], bool]
    utilization: float = 0.0
    delay: int = 0


class DirectSequenceBatch(SequenceBatch):
    """The direct strategy: row i of a batch is slot i, with or without a request."""

    def __init__(
        self,
        owner: SequenceBatchOwner,
        instance: InstanceSlot,
        count: int,
        gate: ExecutionGate,
        strategy: DirectStrategy,
    ) -> None:
        super().__init__(owner, instance, count, gate)
        self._strategy = strategy
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
        strategy = self._strategy
        if not strategy.utilization or not strategy.delay:
            return True
        if len(ready) / len(self.slots) >= strategy.utilization:
            return True
        due = min(call.queued_ns for call in ready) + strategy.delay
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
            if call is not None and (call is first or self._strategy.compatible(first, call)):
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

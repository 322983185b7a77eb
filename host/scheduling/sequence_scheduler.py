"""The scheduler of sequences: gives each sequence a slot, or queues its requests until one is free.

Source: docs/reference/scheduling.md, "Identity of a sequence" and "Slots,
backlog, idle sequences".
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from host.config.schema import ModelConfig
from host.errors import HostError, invalid_argument, unavailable
from host.inference.call import Call, CallState, FailureReason
from host.inference.request import Tensor
from host.logs.formats import model_fields
from host.scheduling.dynamic import CanShareBatch, DynamicScheduler, hold_from_environment
from host.scheduling.queue import ExecutionGate, LimitedGate, OpenGate
from host.scheduling.rate_limiter import Permit
from host.scheduling.scheduler import Clock, CoalescingTimer, InstanceSlot, LoopClock, Scheduler
from host.scheduling.sequence_batch import SequenceBatch, SequenceBatchOwner
from host.scheduling.sequence_call import (
    END,
    START,
    ControlTensors,
    Id,
    Sequence,
    SequenceCall,
    SequenceStates,
    SlotHolder,
)
from host.scheduling.sequence_strategies import DirectSequenceBatch, OldestSequenceBatch

_log = logging.getLogger("pbhost")

BACKLOG_HOLD = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
"""Environment variable: number of calls in the backlog before the first batch."""


NewSequenceBatch = Callable[[SequenceBatchOwner, InstanceSlot, int, ExecutionGate], SequenceBatch]
"""Makes the slots of an instance, by one of the strategies; the number is that of the slots."""


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """The options of a sequence scheduler; `idle` in nanoseconds.

    Nothing starts before `hold` calls are in slots and `backlog_hold` calls in the backlog.
    """

    model: str
    slots: int
    idle: int
    new_batch: NewSequenceBatch
    controls: ControlTensors
    iterative: bool = False
    outputs: tuple[str, ...] = ()
    states: SequenceStates | None = None
    hold: int = 0
    backlog_hold: int = 0


class SequenceScheduler(Scheduler):
    """Keeps the requests of a sequence in order and in one slot of one instance.

    The time of every operation hardly depends on the number of sequences.
    """

    keeps_sequences = True

    def __init__(self, shape: SequenceOptions, clock: Clock | None = None) -> None:
        self.instances: list[InstanceSlot] = []
        self.may_recover: Callable[[], bool] = lambda: False
        self.new_gate: Callable[[InstanceSlot, Callable[[], None]], ExecutionGate] = (
            lambda instance, again: OpenGate()
        )
        self.clock: Clock = LoopClock() if clock is None else clock
        self.on_sequences_ended: Callable[[], None] = lambda: None
        self._queued = 0
        self._shape = shape
        self._known: dict[Id, Sequence] = {}
        self._sequence_batches: dict[InstanceSlot, SequenceBatch] = {}
        # A heap; may contain sequence batches that are gone.
        self._free: list[tuple[int, int, SequenceBatch]] = []
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._backlogged = 0
        # A heap; may contain sequences with a slot.
        self._ends: list[tuple[int, int, Sequence]] = []
        # The time of the last request, oldest first.
        self._arrivals: OrderedDict[Sequence, int] = OrderedDict()
        self._alarm = CoalescingTimer(self.clock, self._check_timeouts)
        self.holding = shape.hold > 0 or shape.backlog_hold > 0

    @property
    def queued(self) -> int:
        """As described by Scheduler."""
        return self._queued

    @property
    def has_sequences(self) -> bool:
        """As described by Scheduler."""
        return bool(self._known)

    def limit_executions(self, permit_of: Callable[[InstanceSlot], Permit]) -> None:
        """As described by Scheduler."""
        self.new_gate = lambda instance, again: LimitedGate(permit_of, again)

    def count_unfinished(self, calls: Collection[Call]) -> int:
        """The number of sequences that have not ended, or have one of these calls in progress."""
        running = (call.sequence for call in calls if isinstance(call, SequenceCall))
        return len({*self._known.values(), *running} - {None})

    # Requests

    def refuse(self, call: Call, error: HostError) -> None:
        """Fails a call that will not run."""
        call.failure_reason = call.failure_reason or FailureReason.OTHER
        call.fail(error)

    def submit(self, call: Call) -> None:
        """Queues a call in its sequence. Raises HostError if it belongs to none."""
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
            request.flags = START  # an END would keep the model from running it again
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
            sequence = self._start_sequence(request.correlation_id)
        elif request.flags & START:
            _log.warning(
                "sequence %s starts again although it has not ended", sequence.id,
                extra=model_fields(self._shape.model, request.model_version),
            )  # fmt: skip
        self._add_to_backlog(call, sequence)
        if request.flags & END:
            self._remove_sequence(sequence)
            sequence.ending = True
        else:
            now = self._arrivals[sequence] = self.clock.now()
            self._arrivals.move_to_end(sequence)
            sequence.overdue = False
            self._alarm.schedule(now + self._shape.idle)  # sequences before it have scheduled it
        if sequence.sequence_batch is not None:
            if not self._end_hold():
                sequence.sequence_batch.slot_ready(sequence.number)
        else:
            self._set_deadline(call, sequence)
            self._end_hold()

    def _start_sequence(self, correlation_id: Id) -> Sequence:
        sequence = self._known[correlation_id] = Sequence(correlation_id)
        while self._free:
            number, _, sequence_batch = heapq.heappop(self._free)
            if (
                self._sequence_batches.get(sequence_batch.instance) is sequence_batch
                and not sequence_batch.retired
            ):
                sequence_batch.assign_slot(sequence, number)
                return sequence
        self._backlog[sequence] = None
        return sequence

    def _add_to_backlog(self, call: SequenceCall, sequence: Sequence) -> None:
        call.sequence = sequence
        call.holder = self if sequence.sequence_batch is None else sequence.sequence_batch
        sequence.calls.append(call)
        self._queued += 1
        if sequence.sequence_batch is None:
            self._backlogged += 1

    def _set_deadline(self, call: SequenceCall, sequence: Sequence) -> None:
        timeout = call.request.timeout_us
        if timeout > 0:
            end = self.clock.now() + timeout * 1000 + 1
            heapq.heappush(self._ends, (end, next(self._numbers), sequence))
            self._alarm.schedule(end)

    def _end_hold(self) -> bool:
        """Ends the hold if enough calls have arrived; returns whether that dispatched calls."""
        if not self.holding:
            return False
        shape = self._shape
        in_slots = self.queued - self._backlogged
        if in_slots < shape.hold or self._backlogged < shape.backlog_hold:
            return False
        self.holding = False
        for sequence_batch in list(self._sequence_batches.values()):
            sequence_batch.dispatch()
        return True

    def cancel_call(self, call: Call) -> bool:
        """Withdraws a queued call; its sequence ends when its turn is reached. Returns False."""
        assert isinstance(call, SequenceCall) and call.sequence is not None
        sequence = call.sequence
        call.failure_reason = call.failure_reason or FailureReason.OTHER
        self.call_dequeued(call)
        if sequence.sequence_batch is None:
            self._backlogged -= 1
        elif sequence.calls and sequence.calls[0] is call:
            sequence.expired = True
            self.end_sequence(sequence)
            sequence.sequence_batch.release_slot(sequence.number)
            sequence.sequence_batch.report_expired()
        return False

    # Sequences

    def _remove_sequence(self, sequence: Sequence) -> None:
        if self._known.get(sequence.id) is sequence:
            del self._known[sequence.id]
            if not self._known:
                self.on_sequences_ended()
        self._arrivals.pop(sequence, None)

    def _expire_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence that was idle for too long once its queued calls have run."""
        sequence.expired = not sequence.ending
        self._finish_sequence(sequence)

    def _finish_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence once its queued calls have run; then its slot is free."""
        self._remove_sequence(sequence)
        if not sequence.ending:
            sequence.ending = True
            sequence_batch = sequence.sequence_batch
            if sequence_batch is not None and not sequence.calls:
                sequence_batch.release_slot(sequence.number)

    def end_sequence(self, sequence: Sequence, error: HostError | None = None) -> None:
        """Removes a sequence and fails its queued calls, as cancelled without an error."""
        self._remove_sequence(sequence)
        calls = list(sequence.calls)
        sequence.calls.clear()
        sequence.dead = True
        for call in calls:
            if call.state is not CallState.RUNNING:
                continue
            call.holder = None
            self.call_dequeued(call)
            if sequence.sequence_batch is None:
                self._backlogged -= 1
            if error is None:
                call.cancel()
            else:
                self.refuse(call, error)

    def call_released(self, call: SequenceCall) -> None:
        """The model has released a call: it runs again, or may be the last of its sequence."""
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
            self._finish_sequence(sequence)

    def slot_free(self, sequence_batch: SequenceBatch, number: int) -> None:
        """Gives a slot to the sequence that has waited longest."""
        if self._sequence_batches.get(sequence_batch.instance) is not sequence_batch:
            return
        if sequence_batch.retired:
            sequence_batch.signal_if_empty()
            return
        while self._backlog:
            sequence = self._backlog.popitem(last=False)[0]
            if any(call.ended for call in sequence.calls):
                self.end_sequence(sequence)
                continue
            self._backlogged -= len(sequence.calls)
            sequence_batch.assign_slot(sequence, number)
            if sequence.overdue:
                self._expire_sequence(sequence)
            sequence_batch.slot_ready(number)
            return
        heapq.heappush(self._free, (number, next(self._numbers), sequence_batch))

    def _check_timeouts(self) -> None:
        """Ends sequences that were idle or queued for too long."""
        now = self.clock.now()
        expired_in: dict[SlotHolder, None] = {}
        while self._ends and self._ends[0][0] <= now:
            sequence = heapq.heappop(self._ends)[2]
            if sequence in self._backlog:
                self._time_out_sequence(sequence)
        while self._arrivals:
            sequence, last = next(iter(self._arrivals.items()))
            if last + self._shape.idle > now:
                self._alarm.schedule(last + self._shape.idle)
                break
            if sequence.sequence_batch is None:
                del self._arrivals[sequence]
                sequence.overdue = True
            else:
                expired_in[sequence.sequence_batch] = None
                self._expire_sequence(sequence)
        for sequence_batch in expired_in:
            sequence_batch.report_expired()
        if self._ends:
            self._alarm.schedule(self._ends[0][0])

    def _time_out_sequence(self, sequence: Sequence) -> None:
        del self._backlog[sequence]
        for call in sequence.calls:
            call.failure_reason = call.failure_reason or FailureReason.REJECTED
        error = unavailable("timeout of the corresponding sequence has been expired")
        self.end_sequence(sequence, error)

    # Extra tensors

    def add_controls_and_states(self, call: SequenceCall) -> None:
        """Adds controls and states to a call that is about to run."""
        shape, request, sequence = self._shape, call.request, call.sequence
        extra = shape.controls.tensors_for(request.flags, request.correlation_id)
        if shape.states is None or sequence is None:
            call.add_controls_and_states(extra, (), {}, {})
            return
        if sequence.states is None or request.flags & START:
            sequence.states = shape.states.initial_states()
        states = sequence.states
        call.add_controls_and_states(
            [*extra, *states.values()], shape.outputs, shape.states.kept, states
        )

    def padding_tensors(self) -> list[Tensor]:
        """The extra tensors of a row without a request."""
        states = self._shape.states
        fresh = [] if states is None else states.initial_states().values()
        return [*self._shape.controls.padding_tensors(), *fresh]

    # Instances

    def call_dequeued(self, call: Call) -> None:
        """A call is no longer queued."""
        self._queued -= 1

    def instance_ready(self, instance: InstanceSlot) -> None:
        """The instance has released its batch, or is new."""
        sequence_batch = self._sequence_batches.get(instance)
        if sequence_batch is not None:
            sequence_batch.instance_ready()
            return
        if instance not in self.instances:
            self.instances.append(instance)
        shape = self._shape
        gate = self.new_gate(instance, lambda: self._resources_granted(instance))
        sequence_batch = shape.new_batch(self, instance, shape.slots, gate)
        self._sequence_batches[instance] = sequence_batch
        for number in range(shape.slots):
            self.slot_free(sequence_batch, number)
        self._end_hold()

    def _resources_granted(self, instance: InstanceSlot) -> None:
        sequence_batch = self._sequence_batches.get(instance)
        if sequence_batch is not None:
            sequence_batch.resources_granted()

    def retire_instance(self, instance: InstanceSlot, then: Callable[[], None]) -> None:
        """As described by Scheduler."""
        sequence_batch = self._sequence_batches.get(instance)
        if sequence_batch is None:
            then()
            return
        self.instances.remove(instance)
        sequence_batch.retired = True
        sequence_batch.on_empty = then
        sequence_batch.signal_if_empty()

    def instance_removed(self, instance: InstanceSlot) -> None:
        """Ends the sequences of the instance with an error, as their slots are lost."""
        if instance in self.instances:
            self.instances.remove(instance)
        sequence_batch = self._sequence_batches.pop(instance, None)
        if sequence_batch is not None:
            for sequence in sequence_batch.close():
                self.end_sequence(sequence, self.slot_lost_error(sequence))
            sequence_batch.signal_if_empty()

    def slot_lost_error(self, sequence: Sequence) -> HostError:
        """The error for a sequence that has lost its slot."""
        return unavailable(
            f"sequence {sequence.id} of model '{self._shape.model}' has ended, for its instance"
            " has; start it again"
        )

    def fail_queued(self, error: HostError) -> None:
        """Fails every call that has not started, and removes the sequences."""
        while self._backlog:
            self.end_sequence(self._backlog.popitem(last=False)[0], error)
        for sequence_batch in list(self._sequence_batches.values()):
            for number, sequence in enumerate(list(sequence_batch.slots)):
                if sequence is not None and sequence.calls:
                    sequence.expired = True
                    self.end_sequence(sequence, error)
                    sequence_batch.release_slot(number)
            sequence_batch.fail_waiting(error)
            sequence_batch.report_expired()


def sequence_scheduler(
    config: ModelConfig,
    compatible: CanShareBatch,
    states: SequenceStates | None = None,
    clock: Clock | None = None,
) -> SequenceScheduler:
    """The scheduler for `sequence_batching`. Raises HostError.

    TRITONSERVER_DELAY_SCHEDULER counts requests in slots with the direct strategy, and requests in
    each instance's batcher with the oldest strategy.
    """
    clock = LoopClock() if clock is None else clock
    batcher = config.sequence_batching
    slots = max(1, config.max_batch_size)
    hold, backlog_hold = hold_from_environment(), 0
    new_batch: NewSequenceBatch
    if batcher.HasField("oldest"):
        oldest, inner_hold, hold = batcher.oldest, hold, 0
        slots = oldest.max_candidate_sequences if oldest.max_candidate_sequences > 0 else slots

        def new_batch(
            owner: SequenceBatchOwner, instance: InstanceSlot, count: int, gate: ExecutionGate
        ) -> SequenceBatch:
            inner = DynamicScheduler(
                config.max_batch_size,
                oldest.max_queue_delay_microseconds / 1e6,
                compatible,
                preferred=oldest.preferred_batch_size,
                keep_order=oldest.preserve_ordering,
                hold=inner_hold,
                clock=clock,
            )
            return OldestSequenceBatch(owner, instance, count, gate, inner)

    else:
        direct = batcher.direct
        new_batch = partial(
            DirectSequenceBatch,
            compatible=compatible,
            utilization=direct.minimum_slot_utilization,
            delay=direct.max_queue_delay_microseconds * 1000,
        )
        backlog_hold = hold_from_environment(BACKLOG_HOLD)
    shape = SequenceOptions(
        model=config.name,
        slots=slots,
        idle=batcher.max_sequence_idle_microseconds * 1000,
        new_batch=new_batch,
        controls=ControlTensors(batcher, config.max_batch_size > 0),
        iterative=batcher.iterative_sequence,
        outputs=tuple(output.name for output in config.output),
        states=states,
        hold=hold,
        backlog_hold=backlog_hold,
    )
    return SequenceScheduler(shape, clock)

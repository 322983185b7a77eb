"""The scheduler of sequences: slots, backlog, batches and idle sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from host.config.schema import pb
from host.errors import ErrorCode, HostError, unavailable
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor
from host.scheduling.sequence_call import END, START, PaddingCall, SequenceCall
from host.scheduling.sequence_scheduler import SequenceScheduler, sequence_scheduler
from host.scheduling.sequence_strategies import OldestSequenceBatch
from tests.unit.host.scheduling.fake_instances import TICK, Clock, FakeInstanceSlot, error_of

US_PER_TICK = TICK // 1000
UNKNOWN = "must specify the START flag on the first request of the sequence"
EXPIRED = "timeout of the corresponding sequence has been expired"


def scheduler_of(
    clock: Clock, text: str = "direct {}", largest: int = 3, idle: int = 1000
) -> SequenceScheduler:
    """Makes a scheduler; `idle` is in ticks."""
    config = pb.ModelConfig(name="m", max_batch_size=largest)
    text_format.Parse(f"sequence_batching {{ {text} }}", config)
    config.sequence_batching.max_sequence_idle_microseconds = idle * US_PER_TICK
    return sequence_scheduler(config, lambda first, other: True, clock=clock)


def call_of(clock: Clock, id: int | str, flags: int = 0, timeout: int = 0) -> SequenceCall:
    inputs = [Tensor("X", "INT32", [1, 1], bytes(4))]
    request = InferRequest(
        "m", inputs, correlation_id=id, flags=flags, timeout_us=timeout * US_PER_TICK
    )
    call = SequenceCall(request)
    call.received_ns = call.queued_ns = clock.now()
    return call


def submit(
    scheduler: SequenceScheduler, clock: Clock, id: int | str, flags: int = 0, timeout: int = 0
) -> SequenceCall:
    call = call_of(clock, id, flags, timeout)
    scheduler.submit(call)
    return call


class InstanceSlot(FakeInstanceSlot):
    """A fake instance that knows which of its rows are requests, and keeps its sequences.

    Its model forgets a sequence after an END that succeeds, or if it is told so.
    """

    potentially_blocking_calls: Sequence[Sequence[Call]] = ()

    def __init__(self, scheduler: SequenceScheduler) -> None:
        super().__init__(scheduler)
        self.known: set[int | str] = set()
        self.told: list[list[int | str]] = []

    def finish(self) -> None:
        for call in self.requests():
            if call.request.flags & END and not call.failed:
                self.known.discard(call.request.correlation_id)
            else:
                self.known.add(call.request.correlation_id)
        super().finish()

    def report_expired_sequences(self, correlation_ids: Sequence[int | str]) -> None:
        assert not self.running, "the model is told while it runs a batch"
        self.told.append(list(correlation_ids))
        self.known -= set(correlation_ids)

    def requests(self) -> list[SequenceCall]:
        return [call for call in self.running if isinstance(call, SequenceCall)]


class Machine(RuleBasedStateMachine):
    """Random events, with a record of the calls of each sequence and of their slots."""

    text = "direct {}"
    largest = 3
    slots = 3
    idle = 15
    rows_are_slots = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(early=1)
        self.scheduler = scheduler_of(self.clock, self.text, self.largest, self.idle)
        self.instances: list[InstanceSlot] = []
        self.calls: list[SequenceCall] = []
        self.answers: dict[Call, int] = {}
        self.ran: list[SequenceCall] = []
        self.places: dict[Any, tuple[InstanceSlot, int]] = {}
        self.seen: dict[InstanceSlot, list[Call]] = {}
        self.retired: dict[InstanceSlot, list[Any]] = {}  # with the sequences that they had then
        self.empty: list[InstanceSlot] = []  # retired instances whose sequences have all ended
        self.open: set[int] = set()  # ids of sequences that cannot have ended yet

    @rule(
        id=st.integers(1, 6),
        flags=st.sampled_from([0, 0, 0, START, START, END, START | END]),
        timeout=st.sampled_from([0, 0, 6]),
    )
    def request_comes(self, id: int, flags: int, timeout: int) -> None:
        call = call_of(self.clock, id, flags, timeout)
        try:
            self.scheduler.submit(call)
        except HostError as error:
            assert error.code is ErrorCode.INVALID_ARG
            assert UNKNOWN in error.message
            assert not flags & START
            assert id not in self.open
            return
        if flags & END:
            self.open.discard(id)
        else:
            self.open.add(id)
        self.calls.append(call)
        self.answers[call] = 0

        def hear(response: InferResponse | None, final: bool) -> None:
            self.answers[call] += 1

        call.subscribe(hear)

    @precondition(lambda self: len(self.instances) - len(self.retired) < 2)
    @rule()
    def instance_joins(self) -> None:
        instance = InstanceSlot(self.scheduler)
        self.instances.append(instance)
        self.scheduler.instance_ready(instance)

    @precondition(lambda self: any(instance.running for instance in self.instances))
    @rule(data=st.data())
    def batch_ends(self, data: st.DataObject) -> None:
        data.draw(
            st.sampled_from([instance for instance in self.instances if instance.running])
        ).finish()

    @precondition(lambda self: self.instances)
    @rule(data=st.data())
    def instance_dies(self, data: st.DataObject) -> None:
        self.open.clear()
        instance = data.draw(st.sampled_from(self.instances))
        queued = [
            call for call in self.calls if not call.finished and self.instance_of(call) is instance
        ]
        self.instances.remove(instance)
        instance.die()
        assert all(call.finished for call in queued)
        if self.retired.pop(instance, None) is not None:
            self.empty.remove(instance)  # its callback has been called

    @precondition(lambda self: len(self.instances) > len(self.retired))
    @rule(data=st.data())
    def instance_is_retired(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from([x for x in self.instances if x not in self.retired]))
        self.retired[instance] = self.sequences_of(instance)
        self.scheduler.retire_instance(instance, lambda: self.empty.append(instance))

    @precondition(lambda self: self.empty)
    @rule()
    def retired_instance_ends(self) -> None:
        instance = self.empty.pop()
        assert not instance.running
        assert not self.sequences_of(instance)
        del self.retired[instance]
        self.instances.remove(instance)
        self.scheduler.instance_removed(instance)

    def sequences_of(self, instance: InstanceSlot) -> list[Any]:
        return [s for s in self.scheduler._sequence_batches[instance].slots if s is not None]

    @invariant()
    def retired_instances_get_no_new_sequences(self) -> None:
        for instance, before in self.retired.items():
            assert set(map(id, self.sequences_of(instance))) <= set(map(id, before))
            assert (
                self.sequences_of(instance)
                or instance.running
                or self.has_calls_in_flight(instance)
                or (self.empty.count(instance) == 1)
            )

    def has_calls_in_flight(self, instance: InstanceSlot) -> bool:
        sequence_batch = self.scheduler._sequence_batches[instance]
        return isinstance(sequence_batch, OldestSequenceBatch) and bool(sequence_batch._in_flight)

    def instance_of(self, call: SequenceCall) -> Any:
        sequence_batch: Any = call.sequence.sequence_batch if call.sequence is not None else None
        return None if sequence_batch is None else sequence_batch.instance

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.open.clear()
        call = data.draw(st.sampled_from(self.calls))
        call.cancel()
        assert call.finished

    @rule(ticks=st.integers(1, 20))
    def time_passes(self, ticks: int) -> None:
        self.open.clear()
        self.clock.advance(ticks)

    @rule()
    def everything_queued_fails(self) -> None:
        self.open.clear()
        self.scheduler.fail_queued(unavailable("no more"))
        assert self.scheduler.queued == 0

    @invariant()
    def batches_keep_to_the_rules(self) -> None:
        for instance in self.instances:
            if not instance.running or self.seen.get(instance) == instance.running:
                continue
            self.seen[instance] = list(instance.running)
            assert len(instance.running) <= self.largest
            sequences = [call.sequence for call in instance.requests()]
            assert len(set(map(id, sequences))) == len(sequences), "two calls of one sequence"
            for row, call in enumerate(instance.running):
                if not isinstance(call, SequenceCall):
                    assert self.rows_are_slots
                    assert row < len(instance.running) - 1, "the last row is padding"
                    continue
                self.ran.append(call)
                place = instance, row if self.rows_are_slots else 0
                assert self.places.setdefault(call.sequence, place) == place, (
                    "the sequence has moved"
                )

    @invariant()
    def a_slot_has_one_sequence(self) -> None:
        sequence_batches = list(self.scheduler._sequence_batches.values())
        assert {id(sequence_batch.instance) for sequence_batch in sequence_batches} == {
            id(instance) for instance in self.instances
        }
        held = [
            sequence
            for sequence_batch in sequence_batches
            for sequence in sequence_batch.slots
            if sequence is not None
        ]
        assert len(held) == len(set(map(id, held)))
        assert all(len(sequence_batch.slots) == self.slots for sequence_batch in sequence_batches)
        if self.scheduler._backlog:
            others = [
                sequence_batch
                for sequence_batch in sequence_batches
                if sequence_batch.instance not in self.retired
            ]
            assert all(None not in sequence_batch.slots for sequence_batch in others), (
                "it waits beside a free slot"
            )

    @invariant()
    def sequences_keep_their_order(self) -> None:
        numbers: dict[Any, int] = {}
        for call in self.ran:
            number = self.calls.index(call)
            assert numbers.get(call.sequence, -1) < number
            numbers[call.sequence] = number

    @invariant()
    def no_call_is_lost_or_answered_twice(self) -> None:
        running = {call for instance in self.instances for call in instance.running}
        waiting = [c for c in self.calls if not c.finished and c not in running]
        assert self.scheduler.queued == len(waiting)
        assert all(self.answers[call] == call.finished for call in self.calls)

    @invariant()
    def no_call_waits_while_an_instance_is_free(self) -> None:
        for sequence_batch in self.scheduler._sequence_batches.values():
            if not any(
                instance is sequence_batch.instance and instance.running
                for instance in self.instances
            ):
                assert not any(s is not None and s.calls for s in sequence_batch.slots)

    @invariant()
    def models_keep_no_sequence_that_has_ended(self) -> None:
        for instance in self.instances:
            if instance.running:
                continue
            sequence_batch = self.scheduler._sequence_batches[instance]
            kept = {sequence.id for sequence in self.sequences_of(instance)}
            if isinstance(sequence_batch, OldestSequenceBatch):
                kept |= {c.sequence.id for c in sequence_batch._in_flight if c.sequence}
            assert instance.known <= kept

    def teardown(self) -> None:
        if len(self.instances) == len(self.retired):
            self.instance_joins()
        for _ in range(2000):
            running = [instance for instance in self.instances if instance.running]
            if not running and not self.scheduler.queued:
                break
            for instance in running:
                instance.finish()
            if not running:
                self.clock.advance(1)
        assert all(self.answers[call] == 1 for call in self.calls)


class OldestMachine(Machine):
    text = "oldest { max_candidate_sequences: 4 preserve_ordering: false }"
    slots = 4
    rows_are_slots = False


class OneSlot(Machine):
    largest = slots = 1


def case(machine: type[Machine], examples: int) -> Any:
    test = machine.TestCase
    test.settings = settings(max_examples=examples, stateful_step_count=50, deadline=None)
    return test


TestDirect = case(Machine, 60)
TestOldest = case(OldestMachine, 60)
TestOneSlot = case(OneSlot, 30)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def with_instance(scheduler: SequenceScheduler) -> InstanceSlot:
    instance = InstanceSlot(scheduler)
    scheduler.instance_ready(instance)
    return instance


def test_new_sequences_fill_instances_evenly(clock: Clock) -> None:
    scheduler = scheduler_of(clock)
    instances = [with_instance(scheduler) for _ in range(2)]
    for number in (1, 2, 3):
        submit(scheduler, clock, number, START)
    assert [len(instance.requests()) for instance in instances] == [1, 1]
    instances[0].finish()
    assert [call.request.correlation_id for call in instances[0].requests()] == [3]


def test_numbers_and_strings_are_different_ids(clock: Clock) -> None:
    scheduler = scheduler_of(clock)
    submit(scheduler, clock, 5, START)
    with pytest.raises(HostError, match=UNKNOWN):
        submit(scheduler, clock, "5")


def test_free_slot_gets_the_oldest_backlogged_sequence(clock: Clock) -> None:
    scheduler = scheduler_of(clock, largest=1)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    waiting = [submit(scheduler, clock, 2, START), submit(scheduler, clock, 2)]
    submit(scheduler, clock, 3, START)
    submit(scheduler, clock, 1, END)
    order = []
    for _ in range(4):
        order += instance.requests()
        instance.finish()
    assert order[2:] == waiting


def test_backlogged_sequence_has_the_shortest_timeout_of_its_requests(clock: Clock) -> None:
    scheduler = scheduler_of(clock, largest=1)
    with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    calls = [submit(scheduler, clock, 2, START), submit(scheduler, clock, 2, timeout=5)]
    clock.advance(5)
    assert not any(call.finished for call in calls)
    clock.advance(1)
    for call in calls:
        error = error_of(call)
        assert error is not None and error.message == EXPIRED
        assert error.code is ErrorCode.UNAVAILABLE
    with pytest.raises(HostError, match=UNKNOWN):
        submit(scheduler, clock, 2)


def test_idle_sequences_lose_their_slots_but_not_their_backlog_place(clock: Clock) -> None:
    scheduler = scheduler_of(clock, largest=1, idle=10)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    waiting = submit(scheduler, clock, 2, START)
    instance.finish()
    clock.advance(9)
    assert not instance.running
    clock.advance(1)
    assert instance.requests() == [waiting]


def test_a_cancelled_head_ends_its_sequence(clock: Clock) -> None:
    scheduler = scheduler_of(clock, largest=1)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    head, behind = submit(scheduler, clock, 1), submit(scheduler, clock, 1)
    head.cancel()
    assert behind.cancelled
    other = submit(scheduler, clock, 2, START)
    assert not instance.told
    instance.finish()
    assert instance.requests() == [other]
    assert instance.told == [[1]]


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 3 }"])
def test_the_model_is_told_between_batches_which_sequences_were_idle_for_too_long(
    clock: Clock, strategy: str
) -> None:
    scheduler = scheduler_of(clock, strategy, idle=10)
    instance, other = with_instance(scheduler), with_instance(scheduler)
    for id in ("a", 2, 3, "elsewhere"):  # the instances get them in turns
        submit(scheduler, clock, id, START)
    while instance.running or other.running:
        for busy in (one for one in (instance, other) if one.running):
            busy.finish()
    submit(scheduler, clock, 3, END)
    clock.advance(9)
    assert not instance.told + other.told
    instance.finish()
    clock.advance(1)
    assert instance.told == [["a"]]
    assert other.told == [[2, "elsewhere"]]
    running = submit(scheduler, clock, 5, START)
    clock.advance(10)
    assert not running.finished and len(instance.told + other.told) == 2
    for busy in (one for one in (instance, other) if one.running):
        busy.finish()
        assert busy.told[1:] == [[5]]


def test_a_sequence_that_has_started_again_is_not_reported(clock: Clock) -> None:
    scheduler = scheduler_of(clock, largest=2, idle=10)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    clock.advance(10)
    submit(scheduler, clock, 1, START)  # in another slot, while the first one still runs
    instance.finish()
    instance.finish()
    assert not instance.told
    clock.advance(10)
    assert instance.told == [[1]]


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 3 }"])
def test_the_model_is_told_if_it_cannot_have_seen_the_end(clock: Clock, strategy: str) -> None:
    scheduler = scheduler_of(clock, strategy, largest=1)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    waiting = submit(scheduler, clock, 1, END)
    instance.finish()
    assert instance.requests() == [waiting]
    waiting.cancel()
    instance.finish()
    assert instance.told == [[1]]


def test_sequences_of_an_instance_that_has_left_are_not_reported(clock: Clock) -> None:
    scheduler = scheduler_of(clock, idle=10)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    instance.die()
    clock.advance(20)
    assert not instance.told


def test_a_head_whose_cancellation_is_requested_is_dequeued_once(clock: Clock) -> None:
    scheduler = scheduler_of(clock, largest=1)
    with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    head, behind = submit(scheduler, clock, 1), submit(scheduler, clock, 1)
    head.request_cancellation(HostError(ErrorCode.CANCELLED, "enough"))
    assert head.cancelled and behind.cancelled
    assert scheduler.queued == 0


def test_direct_batches_can_wait_for_a_share_of_the_slots(clock: Clock) -> None:
    text = "direct { minimum_slot_utilization: 0.6 max_queue_delay_microseconds: 4000 }"
    scheduler = scheduler_of(clock, text)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    assert not instance.running
    submit(scheduler, clock, 2, START)
    assert len(instance.requests()) == 2
    instance.finish()
    submit(scheduler, clock, 2)
    clock.advance(3)
    assert not instance.running
    clock.advance(1)
    assert [isinstance(call, PaddingCall) for call in instance.running] == [True, False]


def test_oldest_batches_wait_for_a_preferred_size_until_their_delay_is_over(clock: Clock) -> None:
    text = "oldest { preferred_batch_size: 2 max_queue_delay_microseconds: 4000 }"
    scheduler = scheduler_of(clock, text)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    assert not instance.running
    submit(scheduler, clock, 2, START)
    assert len(instance.requests()) == 2
    instance.finish()
    late = submit(scheduler, clock, 2)
    clock.advance(3)
    assert not instance.running
    clock.advance(1)
    assert instance.requests() == [late]


def test_oldest_strategy_preserves_order_if_configured(clock: Clock) -> None:
    scheduler = scheduler_of(clock, "oldest { preserve_ordering: true }", largest=1)
    instances = [with_instance(scheduler)]
    first = submit(scheduler, clock, 1, START | END)
    second = submit(scheduler, clock, 2, START | END)
    assert instances[0].requests() == [first]
    instances[0].let_go()
    assert instances[0].requests() == [second]
    second.respond(InferResponse("m", 1))
    assert not second.finished
    first.respond(InferResponse("m", 1))
    assert second.finished


@pytest.mark.parametrize("backlog", [0, 2])
def test_the_first_batch_can_be_held_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "2")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", str(backlog))
    scheduler = scheduler_of(clock, largest=1)
    instance = with_instance(scheduler)
    submit(scheduler, clock, 1, START)
    assert not instance.running
    submit(scheduler, clock, 1)
    assert bool(instance.running) == (backlog == 0)
    submit(scheduler, clock, 2, START)
    submit(scheduler, clock, 2)
    assert instance.running


def test_requests_that_run_again_go_together(clock: Clock) -> None:
    scheduler = scheduler_of(clock, "iterative_sequence: true")
    instance = with_instance(scheduler)
    calls = [submit(scheduler, clock, 0) for _ in range(3)]
    instance.finish()
    assert [call.request.correlation_id for call in calls] == [1, 2, 3]
    again = instance.requests()
    assert again == calls[1:]
    assert all(call.try_reschedule() for call in again)
    instance.running = []
    scheduler.instance_ready(instance)
    assert instance.requests() == again
    assert [call.request.flags for call in again] == [0, 0]


def test_request_of_an_expired_sequence_cannot_run_again(clock: Clock) -> None:
    scheduler = scheduler_of(clock, "iterative_sequence: true", idle=5)
    instance = with_instance(scheduler)
    call = submit(scheduler, clock, 0)
    clock.advance(6)
    assert call.try_reschedule()
    instance.running = []
    scheduler.instance_ready(instance)
    error = error_of(call)
    assert error is not None and UNKNOWN in error.message

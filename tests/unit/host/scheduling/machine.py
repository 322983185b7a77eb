"""A scheduler under arbitrary events beside the plainest scheduler that is right."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from host.errors import unavailable
from host.inference import Call
from host.scheduling.scheduler import Scheduler
from tests.unit.host.scheduling.lanes import Clock, FakeLane, call_of, error_of, running


class SchedulerMachine(RuleBasedStateMachine):
    """`largest` and `delay` (in ticks) describe the scheduler that `make` returns."""

    largest = 1
    delay = 0
    make: Callable[[], Scheduler]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self._patch = running(self.clock)
        self._patch.__enter__()
        self.scheduler = type(self).make()
        self.batches: list[list[Call]] = []
        self.calls: list[Call] = []
        self.lanes: list[FakeLane] = []  # alive
        self.retired: list[FakeLane] = []  # gone, or leaving while they still run something
        # The reference.
        self.queue: list[Call] = []
        self.expected: list[list[Call]] = []

    def teardown(self) -> None:
        self._patch.__exit__(None, None, None)

    # Events

    @initialize(count=st.integers(0, 3))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.lane_joins()

    @rule(size=st.integers(1, 6), kind=st.sampled_from("ab"))
    def submit(self, size: int, kind: str) -> None:
        call = call_of(size, kind, self.clock.ns)
        self.calls.append(call)
        self.queue.append(call)
        self.scheduler.submit(call)

    @rule()
    def lane_joins(self) -> None:
        lane = FakeLane(self.scheduler, self.batches)
        self.lanes.append(lane)
        self.scheduler.lane_free(lane)

    @precondition(lambda self: any(lane.running for lane in self.lanes))
    @rule(data=st.data())
    def batch_ends(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([lane for lane in self.lanes if lane.running])).finish()

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def lane_dies(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        self.lanes.remove(lane)
        self.retired.append(lane)
        lane.die()

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def lane_leaves_and_its_batch_goes_on(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        self.lanes.remove(lane)
        self.retired.append(lane)
        self.scheduler.lane_gone(lane)

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def lane_is_gone_once_more(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.retired)).die()

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def lane_comes_back(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.retired))
        self.retired.remove(lane)
        self.lanes.append(lane)
        lane.finish()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        if call in self.queue:
            self.queue.remove(call)
        told = {id(lane): len(lane.cancelled) for lane in [*self.lanes, *self.retired]}
        ended = call.finished
        call.cancel()
        assert call.finished
        for lane in [*self.lanes, *self.retired]:
            runs_here = call in lane.running and not ended
            assert len(lane.cancelled) - told[id(lane)] == runs_here

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.clock.ticks += 1
            self.settle()
            self.clock.run_due()

    @rule()
    def everything_queued_fails(self) -> None:
        error = unavailable("no more")
        failed, self.queue = self.queue, []
        self.scheduler.fail_queued(error)
        assert all(error_of(call) is error for call in failed)

    # The reference

    def settle(self) -> None:
        """What the plainest scheduler would start now."""
        free = sum(not lane.running for lane in self.lanes)
        started = len(self.batches) - len(self.expected)  # lanes that have just been taken
        free += max(0, started)
        while free and self.queue:
            batch = [self.queue[0]]
            for call in self.queue[1:]:
                size = sum(each.request.batch_size for each in [*batch, call])
                if size > self.largest or call.request.id != batch[0].request.id:
                    break
                batch.append(call)
            full = sum(each.request.batch_size for each in batch) >= self.largest
            full = full or len(batch) < len(self.queue)
            due_at = batch[0].queued_ns // 1953125 + self.delay
            if not full and self.clock.ticks < due_at:
                return
            del self.queue[: len(batch)]
            self.expected.append(batch)
            free -= 1

    @invariant()
    def batches_are_those_of_the_reference(self) -> None:
        self.clock.run_due()
        self.settle()
        assert self.batches == self.expected
        assert self.scheduler.queued == len(self.queue)
        assert sorted(map(id, self.scheduler.lanes)) == sorted(map(id, self.lanes))

    @invariant()
    def no_call_is_lost_or_run_twice(self) -> None:
        ran = [call for batch in self.batches for call in batch]
        assert len(ran) == len(set(map(id, ran)))
        busy = [call for lane in [*self.lanes, *self.retired] for call in lane.running]
        for call in self.calls:
            assert (call in self.queue) + (call in busy or call.finished) == 1
            if call in self.queue:
                assert call.place is self.scheduler

    @invariant()
    def batches_keep_to_the_rules(self) -> None:
        order = {id(call): number for number, call in enumerate(self.calls)}
        ran = [order[id(call)] for batch in self.batches for call in batch]
        assert ran == sorted(ran)
        for batch in self.batches:
            size = sum(call.request.batch_size for call in batch)
            assert len(batch) == 1 or size <= self.largest
            assert len({call.request.id for call in batch}) == 1

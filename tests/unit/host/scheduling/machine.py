"""Compares a scheduler under random events with a simple reference scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from host.errors import ErrorCode, HostError, unavailable
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.scheduling.queue import QueuePolicies, QueuePolicy
from host.scheduling.scheduler import Clock as AnyClock
from host.scheduling.scheduler import Scheduler
from tests.unit.host.scheduling.fake_instances import (
    TICK,
    Clock,
    FakeInstanceSlot,
    is_held_by,
    prepared,
    request_of,
)

REQUESTS = st.tuples(
    st.integers(0, 6), st.sampled_from("aab"), st.integers(0, 4), st.integers(0, 9)
)
"""Size, kind, priority, timeout in ticks."""


@dataclass
class Entry:
    """A queued call of the reference scheduler; times are in ticks."""

    call: Call
    came: int
    level: int
    policy: QueuePolicy
    end: int | None  # the last tick before it times out
    late: int = 0  # its position among the delayed calls; 0 if it is in time


@dataclass
class Heard:
    """The responses that the caller has received."""

    responses: list[InferResponse | None] = field(default_factory=list)
    ended: bool = False

    @property
    def error(self) -> HostError | None:
        last = self.responses[-1]
        return None if last is None else last.error


class SchedulerMachine(RuleBasedStateMachine):
    """The class attributes (times in ticks) describe the scheduler that `make` returns."""

    max_instances = 2
    eager = 0  # prefetched batches that an instance accepts
    largest = 1
    preferred: frozenset[int] = frozenset()
    delay = 0
    hold = 0
    policies = QueuePolicies()
    new_call: Callable[[InferRequest], Call] = Call
    make: Callable[[AnyClock], Scheduler]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(early=1)
        self.scheduler = type(self).make(self.clock)
        self.batches: list[list[Call]] = []
        self.calls: list[Call] = []
        self.heard: dict[Call, Heard] = {}
        self.sent: dict[Call, int] = {}  # number of non-final responses
        self.instances: list[FakeInstanceSlot] = []  # alive
        self.retired: list[FakeInstanceSlot] = []  # removed; may still run a batch
        # The reference.
        self.queue: list[Entry] = []
        self.expected: list[list[Call]] = []
        self.refused: set[Call] = set()
        self.holding = self.hold
        self.moved = 0

    # Events

    @initialize(count=st.integers(0, 2))
    def begin(self, count: int) -> None:
        for _ in range(min(count, self.max_instances)):
            self.instance_joins()

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def requests_come(self, requests: list[tuple[int, str, int, int]]) -> None:
        for request in requests:
            self.submit(*request)
            self.settle()

    def submit(self, size: int, kind: str, priority: int, timeout: int) -> None:
        call = prepared(
            type(self).new_call(request_of(size, kind, priority, timeout)), self.clock.now()
        )
        level = self.level_of(priority)
        policy = self.policies.own.get(level, self.policies.default)
        waiting = sum(entry.level == level for entry in self.queue)
        if policy.max_size and waiting >= policy.max_size:
            try:
                self.scheduler.submit(call)
            except HostError as error:
                assert error.code is ErrorCode.UNAVAILABLE
                assert error.message == f"[request id: {kind}] Exceeds maximum queue size"
                return
            raise AssertionError("one too many")
        patience = policy.timeout_us * 1000 // TICK
        if policy.may_shorten and 0 < timeout < patience:
            patience = timeout
        now = self.clock.ticks
        self.queue.append(Entry(call, now, level, policy, now + patience if patience else None))
        self.calls.append(call)
        heard = self.heard[call] = Heard()

        def hear(response: InferResponse | None, final: bool) -> None:
            assert not heard.ended, "responds after the final response"
            heard.responses.append(response)
            heard.ended = final

        call.subscribe(hear)
        self.scheduler.submit(call)

    def level_of(self, priority: int) -> int:
        if self.policies.levels == 0:
            return 0
        if 1 <= priority <= self.policies.levels:
            return priority
        return self.policies.default_level

    @precondition(lambda self: len(self.instances) < self.max_instances)
    @rule()
    def instance_joins(self) -> None:
        instance = FakeInstanceSlot(self.scheduler, self.batches, self.eager)
        self.instances.append(instance)
        self.scheduler.instance_ready(instance)

    @precondition(lambda self: any(instance.running for instance in self.instances))
    @rule(data=st.data())
    def batch_ends(self, data: st.DataObject) -> None:
        data.draw(
            st.sampled_from([instance for instance in self.instances if instance.running])
        ).finish()

    @precondition(lambda self: any(instance.running for instance in self.instances))
    @rule(data=st.data())
    def batch_releases_its_instance(self, data: st.DataObject) -> None:
        data.draw(
            st.sampled_from([instance for instance in self.instances if instance.running])
        ).let_go()

    @precondition(lambda self: self.loose())
    @rule(data=st.data())
    def detached_call_ends(self, data: st.DataObject) -> None:
        instance, call = data.draw(st.sampled_from(self.loose()))
        instance.loose.remove(call)
        call.respond(InferResponse("m", 1))

    @precondition(lambda self: self.loose())
    @rule(data=st.data(), count=st.integers(1, 3))
    def detached_call_responds(self, data: st.DataObject, count: int) -> None:
        _, call = data.draw(st.sampled_from(self.loose()))
        for _ in range(count):
            self.sent[call] = self.sent.get(call, 0) + (not call.finished)
            call.respond(InferResponse("m", 1), final=False)

    def loose(self) -> list[tuple[FakeInstanceSlot, Call]]:
        return [
            (instance, call)
            for instance in [*self.instances, *self.retired]
            for call in instance.loose
        ]

    @precondition(lambda self: self.instances)
    @rule(data=st.data())
    def instance_dies(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.instances))
        self.instances.remove(instance)
        self.retired.append(instance)
        instance.die()

    @precondition(lambda self: self.instances)
    @rule(data=st.data())
    def instance_leaves_and_its_batch_continues(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.instances))
        self.instances.remove(instance)
        self.retired.append(instance)
        mine = [entry for entry in self.queue if entry.call in instance.ahead]
        for entry in mine:
            self.queue.remove(entry)
            self.expected.append([entry.call])
        instance.leave()

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def instance_is_removed_twice(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.retired)).die()

    @precondition(lambda self: self.retired and len(self.instances) < self.max_instances)
    @rule(data=st.data())
    def instance_recovers(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.retired))
        self.retired.remove(instance)
        self.instances.append(instance)
        instance.come_back()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        self.queue = [entry for entry in self.queue if entry.call is not call]
        everywhere = [*self.instances, *self.retired]
        told = {id(instance): len(instance.cancelled) for instance in everywhere}
        ended = call.finished
        call.cancel()
        assert call.finished
        for instance in everywhere:
            runs_here = call in [*instance.running, *instance.loose, *instance.ahead] and not ended
            assert len(instance.cancelled) - told[id(instance)] == runs_here

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
        assert all(self.heard[entry.call].error is error for entry in failed)

    # The reference

    def settle(self) -> None:
        """Starts and rejects calls as the reference scheduler does."""
        now = self.clock.ticks
        for entry in list(self.queue):
            if entry.end is not None and now > entry.end:
                entry.end = None
                if entry.policy.delays:
                    self.moved += 1
                    entry.late = self.moved
                else:
                    self.queue.remove(entry)
                    self.refused.add(entry.call)
        if len(self.queue) >= self.holding:
            self.holding = 0
        if self.holding:
            return
        free = sum(not instance.running for instance in self.instances)
        free += len(self.batches) - len(self.expected)  # instances that have just got a batch
        while free > 0 and self.queue:
            # The sort is stable: calls in time keep their order.
            self.queue.sort(key=lambda entry: (entry.level, entry.late))
            count = self.due_now(now)
            if not count:
                return
            self.expected.append([entry.call for entry in self.queue[:count]])
            del self.queue[:count]
            free -= 1

    def due_now(self, now: int) -> int:
        """The number of queued calls that form a batch now.

        See docs/reference/scheduling.md, "Forming a batch".
        """
        preferred = self.preferred or frozenset([self.largest])
        best = pending = 0
        send_now = False
        candidates: list[Entry] = []
        for entry in self.queue:
            elements = max(1, entry.call.request.batch_size)
            if candidates:
                if pending + elements > max(preferred) and best == 0:
                    best = len(candidates)
                same = entry.call.request.id == candidates[0].call.request.id
                if pending + elements > self.largest or not same:
                    send_now = True
                    break
            candidates.append(entry)
            pending += elements
            if pending in preferred:
                best = len(candidates)
        over = self.delay > 0 and now - min(entry.came for entry in candidates) >= self.delay
        if best and not over:
            return best
        if send_now or pending >= max(preferred) or over or self.delay == 0:
            return len(candidates)
        return 0

    @invariant()
    def batches_are_those_of_the_reference(self) -> None:
        self.clock.run_due()
        self.settle()
        assert self.batches == self.expected
        assert self.scheduler.queued == len(self.queue)
        assert sorted(map(id, self.scheduler.instances)) == sorted(map(id, self.instances))

    @invariant()
    def those_that_waited_too_long_are_refused(self) -> None:
        for call in self.refused:
            error = self.heard[call].error
            assert error is not None and error.message == "Request timeout expired"
            assert error.code is ErrorCode.UNAVAILABLE

    @invariant()
    def no_call_is_lost_or_run_twice(self) -> None:
        ran = [call for batch in self.batches for call in batch]
        assert len(ran) == len(set(map(id, ran)))
        assert not self.refused & set(ran)
        busy = [
            c
            for instance in [*self.instances, *self.retired]
            for c in (*instance.running, *instance.loose)
        ]
        busy += [call for instance in self.retired for call in instance.ahead]
        waiting = {entry.call for entry in self.queue}
        for call in self.calls:
            assert (call in waiting) + (call in busy or self.has_ended(call)) == 1
            if call in waiting:
                assert is_held_by(call, self.scheduler)
            assert self.heard[call].ended == call.finished

    def has_ended(self, call: Call) -> bool:
        """Whether the model has finished the call."""
        return call.finished

    @invariant()
    def batches_keep_to_the_rules(self) -> None:
        for batch in self.batches:
            size = sum(call.request.batch_size for call in batch)
            assert len(batch) == 1 or size <= self.largest
            assert len({call.request.id for call in batch}) == 1

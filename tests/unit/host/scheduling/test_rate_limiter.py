"""The rate limiter: order of grants, limits, and needs that can never be met."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.errors import ErrorCode, HostError, unavailable
from host.inference.call import Call
from host.scheduling.direct import DirectScheduler
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.queue import LimitedGate, QueuePolicies, QueuePolicy
from host.scheduling.rate_limiter import (
    Permit,
    RateLimiter,
    Resource,
    ResourceLimit,
    ResourceRequest,
)
from host.scheduling.scheduler import InstanceSlot
from tests.unit.host.scheduling.fake_instances import TICK, Clock, FakeInstanceSlot, call_of


def need(name: str = "R", count: int = 1, device: int = 0, priority: int = 1) -> ResourceRequest:
    return ResourceRequest([Resource(name, count)], device, priority)


def shared(name: str = "R", count: int = 1, device: int = 0) -> ResourceRequest:
    return ResourceRequest([Resource(name, count, shared=True)], device)


def send_request(permit: Permit, log: list[str], name: str) -> None:
    """Requests an execution; logs the name and starts when it is granted."""

    def granted() -> None:
        log.append(name)
        permit.start_execution()

    if permit.request_execution(granted):
        granted()


def test_instances_without_resources_do_not_wait() -> None:
    limiter = RateLimiter()
    log: list[str] = []
    for name in "abc":
        send_request(limiter.permit(ResourceRequest()), log, name)
    assert log == ["a", "b", "c"]


def test_default_limit_is_the_largest_need() -> None:
    limiter = RateLimiter()
    large, one, other = (limiter.permit(need(count=count)) for count in (2, 1, 1))
    log: list[str] = []
    send_request(one, log, "one")
    send_request(other, log, "other")
    send_request(large, log, "large")
    assert log == ["one", "other"]
    one.finish_execution()
    assert log == ["one", "other"]
    other.finish_execution()
    assert log == ["one", "other", "large"]


def test_closed_permit_lowers_the_default_limit() -> None:
    limiter = RateLimiter()
    large, one, other = (limiter.permit(need(count=count)) for count in (2, 1, 1))
    large.close()
    log: list[str] = []
    send_request(one, log, "one")
    send_request(other, log, "other")
    assert log == ["one"]


def test_larger_need_of_a_new_instance_raises_the_limit() -> None:
    limiter = RateLimiter()
    one, other = limiter.permit(need()), limiter.permit(need())
    log: list[str] = []
    send_request(one, log, "one")
    send_request(other, log, "other")
    limiter.permit(need(count=2))
    assert log == ["one", "other"]


def test_first_waiting_permit_is_not_overtaken() -> None:
    limiter = RateLimiter([ResourceLimit("R", 1), ResourceLimit("S", 1)])
    holder, first, other = (limiter.permit(need(name)) for name in ("R", "R", "S"))
    log: list[str] = []
    send_request(holder, log, "holder")
    send_request(first, log, "first")
    send_request(other, log, "other")
    assert log == ["holder"], "S is free, but the other permit is not first"
    holder.finish_execution()
    assert log == ["holder", "first", "other"]


def test_resources_are_granted_all_at_once() -> None:
    limiter = RateLimiter([ResourceLimit("R", 1), ResourceLimit("S", 1)])
    both = limiter.permit(ResourceRequest([Resource("R", 1), Resource("S", 1)]))
    holder, small = limiter.permit(need("S")), limiter.permit(need("R"))
    log: list[str] = []
    send_request(holder, log, "holder")
    send_request(both, log, "both")
    both.release_unused()
    send_request(small, log, "small")
    assert log == ["holder", "small"], "no part of R was reserved for both"


def test_permit_with_fewer_executions_goes_first() -> None:
    limiter = RateLimiter()
    holder, often, seldom = (limiter.permit(need()) for _ in range(3))
    log: list[str] = []
    for _ in range(2):
        send_request(often, log, "often")
        often.finish_execution()
    send_request(holder, log, "holder")
    send_request(often, log, "often")
    send_request(seldom, log, "seldom")
    holder.finish_execution()
    seldom.finish_execution()
    assert log[-2:] == ["seldom", "often"]


def test_pools_are_per_device_or_shared() -> None:
    limiter = RateLimiter()
    log: list[str] = []
    for device in (0, 1):
        send_request(limiter.permit(need("LOCAL", device=device)), log, f"local {device}")
    for device in (0, 1):
        send_request(limiter.permit(shared("GLOBAL", device=device)), log, f"global {device}")
    assert log == ["local 0", "local 1", "global 0"]


LIMITED = (
    'Resource count for "R" is limited to {} which will prevent scheduling of one or more model'
    " instances, the minimum required count is {}"
)


@pytest.mark.parametrize(
    ("allowances", "wanted", "limit"),
    [
        ([ResourceLimit("R", 1)], need(count=2), 1),
        ([ResourceLimit("S", 9)], need(), 0),
        ([ResourceLimit("r", 9)], need(), 0),
        ([ResourceLimit("R", 3), ResourceLimit("R", 2)], need(count=3), 2),
        ([ResourceLimit("R", 9, 1)], need(device=0), 0),
        ([ResourceLimit("R", 9), ResourceLimit("R", 1, 0)], need(count=2, device=0), 1),
        ([ResourceLimit("R", 1, 0), ResourceLimit("R", 2, 1)], shared(count=3), 2),
    ],
    ids=["too little", "not listed", "other case", "least of repeats", "other device",
         "device before all", "largest of devices"],
)  # fmt: skip
def test_need_above_the_limit_is_rejected(
    allowances: Sequence[ResourceLimit], wanted: ResourceRequest, limit: int
) -> None:
    limiter = RateLimiter(allowances)
    with pytest.raises(HostError) as caught:
        limiter.permit(wanted)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == LIMITED.format(limit, wanted.resources[0].count)
    limiter.permit(ResourceRequest())  # a permit without needs is not kept


@pytest.mark.parametrize(
    ("allowances", "wanted"),
    [
        ([ResourceLimit("R", 9)], need(count=9, device=3)),
        ([ResourceLimit("R", 1), ResourceLimit("R", 2, 0)], need(count=2, device=0)),
        ([ResourceLimit("R", 1, 0), ResourceLimit("R", 2, 1)], shared(count=2)),
    ],
    ids=["every device", "device before all", "shared"],
)
def test_need_within_the_limit_is_granted(
    allowances: Sequence[ResourceLimit], wanted: ResourceRequest
) -> None:
    log: list[str] = []
    send_request(RateLimiter(allowances).permit(wanted), log, "it")
    assert log == ["it"]


def test_a_name_is_shared_or_of_devices_and_not_both() -> None:
    limiter = RateLimiter()
    limiter.permit(need())
    with pytest.raises(HostError) as caught:
        limiter.permit(shared())
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        'Resource "R" is present as both global and device-specific resource in the model'
        " configuration."
    )


def test_loading_holds_resources() -> None:
    asyncio.run(loading_holds_resources())


async def loading_holds_resources() -> None:
    limiter = RateLimiter()
    one, other = limiter.permit(need()), limiter.permit(need())
    log: list[str] = []
    async with one.held():
        send_request(other, log, "other")
        assert log == []
    assert log == ["other"]
    waiting = asyncio.ensure_future(one.held().__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    other.finish_execution()
    send_request(other, log, "other")
    assert log == ["other", "other"], "a cancelled waiter blocks no other permit"


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), max_size=60),
)
def test_resources_are_granted_once_and_every_permit_runs(
    wants: list[tuple[int, int]], steps: list[int]
) -> None:
    limiter = RateLimiter([ResourceLimit("R", 3)])
    permits = [limiter.permit(need(count=count, priority=rank)) for count, rank in wants]
    running: list[Permit] = []
    waiting: list[Permit] = []

    def begin(permit: Permit) -> None:
        if permit in waiting:
            waiting.remove(permit)
        permit.start_execution()
        running.append(permit)
        assert sum(p.need.resources[0].count for p in running) <= 3

    for step in steps:
        permit = permits[step % len(permits)]
        if permit in running:
            running.remove(permit)
            permit.finish_execution()
        elif permit not in waiting:
            waiting.append(permit)
            if permit.request_execution(partial(begin, permit)):
                begin(permit)
    while running:
        running.pop().finish_execution()
    assert not waiting


# Schedulers with a gate


def gated(
    scheduler: DirectScheduler | DynamicScheduler, limiter: RateLimiter, *needs: ResourceRequest
) -> list[FakeInstanceSlot]:
    instances: list[FakeInstanceSlot] = []
    permits: dict[InstanceSlot, Permit] = {}

    class Limited(FakeInstanceSlot):
        def run(self, calls: Sequence[Call]) -> None:
            permits[self].start_execution()
            super().run(calls)

        def finish(self) -> None:
            super().finish()
            permits[self].finish_execution()

    for wanted in needs:
        limited = Limited(scheduler)
        permits[limited] = limiter.permit(wanted)
        instances.append(limited)
    scheduler.gate = LimitedGate(permits.__getitem__, scheduler.dispatch)
    for instance in instances:
        scheduler.instance_ready(instance)
    return instances


@pytest.mark.parametrize("kind", ["direct", "dynamic"])
def test_calls_of_two_models_share_a_resource(kind: str) -> None:
    limiter = RateLimiter()

    def scheduler() -> DirectScheduler | DynamicScheduler:
        if kind == "direct":
            return DirectScheduler()
        return DynamicScheduler(4, 0, lambda one, other: True, clock=Clock())

    one, other = scheduler(), scheduler()
    (instance,) = gated(one, limiter, need())
    (second,) = gated(other, limiter, need())
    calls = [call_of() for _ in range(4)]
    one.submit(calls[0])
    for waiting in calls[1:]:
        other.submit(waiting)
    assert instance.running == [calls[0]]
    assert other.queued == 3
    calls[1].cancel()
    instance.finish()
    assert second.running == (calls[2:] if kind == "dynamic" else calls[2:3]), (
        "dynamic batches may grow"
    )


def test_unused_permit_passes_to_another_model() -> None:
    limiter = RateLimiter()
    schedulers = [DirectScheduler() for _ in range(3)]
    instances = [gated(scheduler, limiter, need())[0] for scheduler in schedulers]
    calls = [call_of() for _ in range(3)]
    for scheduler, waiting in zip(schedulers, calls, strict=True):
        scheduler.submit(waiting)
    calls[1].cancel()
    instances[0].finish()
    assert not instances[1].running
    assert instances[2].running == [calls[2]]
    schedulers[1].submit(fresh := call_of())
    instances[2].finish()
    assert instances[1].running == [fresh]


@pytest.mark.parametrize("end", ["cancelled", "failed", "expired"])
def test_model_with_an_empty_queue_does_not_block_others(end: str) -> None:
    clock = Clock()
    limiter = RateLimiter([ResourceLimit("R", 1), ResourceLimit("S", 1)])
    policies = QueuePolicies(default=QueuePolicy(timeout_us=5 * TICK // 1000))
    needy = DynamicScheduler(4, 0, lambda one, other: True, clock=clock, policies=policies)
    holder, other = DirectScheduler(), DirectScheduler()
    gated(holder, limiter, need("R"))
    gated(needy, limiter, need("R"))
    (instance,) = gated(other, limiter, need("S"))
    holder.submit(call_of())
    needy.submit(waiting := call_of(now_ns=clock.now()))
    other.submit(call_of())
    assert not instance.running
    if end == "cancelled":
        waiting.cancel()
    elif end == "failed":
        needy.fail_queued(unavailable("no"))
    else:
        clock.advance(10)
    assert waiting.finished
    assert instance.running


def test_removed_instance_that_waited_blocks_no_other() -> None:
    limiter = RateLimiter()
    schedulers = [DirectScheduler() for _ in range(3)]
    instances = [gated(scheduler, limiter, need())[0] for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.submit(call_of())
    schedulers[1].instance_removed(instances[1])
    instances[0].finish()
    assert instances[2].running
    assert schedulers[1].queued == 1


def test_the_instance_that_has_run_least_is_chosen() -> None:
    scheduler = DirectScheduler()
    instances = gated(scheduler, RateLimiter(), need(priority=1), need(priority=2))
    runs = {id(instance): 0 for instance in instances}
    for _ in range(30):
        scheduler.submit(call_of())
        (busy,) = [instance for instance in instances if instance.running]
        runs[id(busy)] += 1
        busy.finish()
    assert list(runs.values()) == [20, 10]


def test_model_of_priority_one_runs_twice_as_often_as_one_of_priority_two() -> None:
    limiter = RateLimiter()
    schedulers = [DirectScheduler() for _ in range(2)]
    instances = [
        gated(scheduler, limiter, need(priority=priority))[0]
        for priority, scheduler in enumerate(schedulers, 1)
    ]
    for _ in range(30):
        for scheduler in schedulers:
            scheduler.submit(call_of())
    runs = [0, 0]
    for _ in range(30):
        (busy,) = [index for index, instance in enumerate(instances) if instance.running]
        runs[busy] += 1
        instances[busy].finish()
    assert runs == [20, 10]

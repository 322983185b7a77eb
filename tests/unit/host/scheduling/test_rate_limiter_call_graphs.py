"""Models with resources that call each other: whatever can finish finishes.

The schedulers, the gates, the rate limiter and the deadlock detector are the real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from host.bls import DeadlockDetector
from host.inference.call import Call, CallHolder
from host.inference.request import InferResponse
from host.scheduling.direct import DirectScheduler
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.queue import LimitedGate
from host.scheduling.rate_limiter import Permit, RateLimiter, Resource, ResourceRequest
from host.scheduling.scheduler import InstanceSlot
from tests.unit.host.scheduling.fake_instances import TICK, Clock, call_of

SECOND = 1_000_000_000 // TICK

Needs = tuple[dict[str, int], int]
"""The resources of an instance, and its priority."""


@dataclass
class Model:
    """The needs of its instances, the models that it calls one after the other, its batcher."""

    instances: list[Needs]
    calls: list[int]
    batches: bool = False


class World:
    """Runs models whose instances act one step at a time, in an order that the test chooses."""

    def __init__(self, models: list[Model]) -> None:
        self.clock = Clock()
        self.detector = DeadlockDetector(self.clock)
        self.limiter = RateLimiter()
        self.models = models
        self.schedulers: list[DirectScheduler | DynamicScheduler] = [
            DynamicScheduler(2, 0, lambda one, other: True, clock=self.clock)
            if model.batches
            else DirectScheduler()
            for model in models
        ]
        self.instances: list[Instance] = []
        self.failed: list[Call] = []
        for number, model in enumerate(models):
            self.schedulers[number].gate = LimitedGate(_permit_of, self.schedulers[number].dispatch)
            for resources, priority in model.instances:
                needs = [Resource(name, count) for name, count in resources.items()]
                permit = self.limiter.permit(ResourceRequest(needs, priority=priority))
                self.instances.append(Instance(self, number, permit, resources))
        for instance in self.instances:
            self.schedulers[instance.model].instance_ready(instance)

    def send(self, model: int) -> Call:
        call = call_of(now_ns=self.clock.now())
        call.request.model_name = str(model)
        call.subscribe(lambda response, final: self._on_response(call, response))
        self.schedulers[model].submit(call)
        return call

    def _on_response(self, call: Call, response: InferResponse | None) -> None:
        if response is None or response.error is None:
            return
        assert response.error.message.endswith(
            f"resources that model '{call.request.model_name}' needs are held by a request that"
            " waits for this one. Let the two models need different resources, or raise"
            " --rate-limit-resource"
        ) or ("every instance of model" in response.error.message)
        self.failed.append(call)
        self._assert_blocked(int(call.request.model_name), "resources" in response.error.message)

    def _assert_blocked(self, model: int, by_resources: bool) -> None:
        """No instance of the model could have run: each is busy, or its own resources are held."""
        of_model = [one for one in self.instances if one.model == model]
        idle = [one for one in of_model if not one.running]
        assert bool(idle) == by_resources, "the text is untrue"
        used: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for one in self.instances:
            most |= Counter(one.resources)
            if one.running:
                used.update(one.resources)
        for one in idle:
            lacking = [name for name, n in one.resources.items() if used[name] + n > most[name]]
            assert lacking, "it could have run"

    def run(self, choices: Sequence[int]) -> None:
        """Lets instances act until none can, and looks for deadlocks about once a second."""
        step = 0
        for _ in range(2000):
            able = [one for one in self.instances if one.can_act]
            if able:
                choice = choices[step % len(choices)] if choices else 0
                step += 1
                able[choice % len(able)].act()
            elif self.clock.armed:
                self.clock.advance(SECOND)
            else:
                return
        raise AssertionError("it does not come to an end")


@dataclass(eq=False)
class Instance(InstanceSlot):
    """An instance that calls the models of its list, and responds after the last one."""

    world: World
    model: int
    permit: Permit
    resources: dict[str, int]
    running: list[Call] = field(default_factory=list)
    made: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.permit.owner = self

    def run(self, calls: Sequence[Call]) -> None:
        assert self.permit.granted and not self.running
        self.running = list(calls)
        self.permit.start_execution()

    @property
    def blocking_calls(self) -> Sequence[Call]:
        return [call for call in self.made if not call.finished]

    @property
    def can_act(self) -> bool:
        return bool(self.running) and not self.blocking_calls

    def act(self) -> None:
        """Makes its next call, or responds and becomes free."""
        calls = self.world.models[self.model].calls
        if len(self.made) < len(calls):
            call = self.world.send(calls[len(self.made)])
            self.made.append(call)
            self.world.detector.add_call(call)
            return
        finished, self.running, self.made = self.running, [], []
        for call in finished:
            call.respond(InferResponse("m", 1))
        self.world.schedulers[self.model].instance_ready(self)
        self.permit.finish_execution()

    @property
    def resource_holders(self) -> Sequence[CallHolder]:
        return () if self.permit.active else self.permit.holders

    def overtake(self) -> bool:
        return self.permit.overtake()

    def drain_prefetched(self) -> Sequence[Call]:
        return ()


def _permit_of(instance: InstanceSlot) -> Permit:
    assert isinstance(instance, Instance)
    return instance.permit


NEEDS = st.tuples(
    st.dictionaries(st.sampled_from("RST"), st.integers(1, 2), max_size=2), st.integers(0, 3)
)


@st.composite
def model_lists(draw: st.DrawFn) -> list[Model]:
    """Models that call only later ones, so that only resources can make them wait in a circle."""
    count = draw(st.integers(2, 5))
    return [
        Model(
            draw(st.lists(NEEDS, min_size=1, max_size=3)),
            draw(st.lists(st.integers(number + 1, count - 1), max_size=2))
            if number < count - 1
            else [],
            draw(st.booleans()),
        )
        for number in range(count)
    ]


R: Needs = {"R": 1}, 1
NOTHING: Needs = {}, 1


@given(
    model_lists(),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), max_size=20),
)
@example([Model([R], [2]), Model([R], [2]), Model([NOTHING], [])], [0, 1], [])
@example([Model([R], [2]), Model([R], [2]), Model([({"S": 1}, 1)], [])], [0, 1], [])
@example([Model([R], [2]), Model([R], [2]), Model([R, ({"S": 1}, 3)], [])], [0, 1], [])
@settings(max_examples=400, deadline=None)
def test_whatever_can_finish_finishes(
    models: list[Model], requests: list[int], choices: list[int]
) -> None:
    world = World(models)
    calls = [world.send(number % len(models)) for number in requests]
    world.run(choices)
    assert all(call.finished for call in calls), "a request hangs"
    assert not any(call in world.failed for call in calls), "only calls between models may fail"
    assert not any(one.running or one.permit.active for one in world.instances)

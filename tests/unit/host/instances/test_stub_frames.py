"""What holds for any frames that a stub sends, whether they keep to the protocol or not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from host.inference.call import Batch, Call
from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor
from host.instances.bls_requests import BlsRequest
from host.instances.instance import Instance
from host.logs.formats import Label
from stub.wire import messages as m
from stub.wire.messages import INLINE_LIMIT, WireError, WireRequest, WireResponse, WireTensor
from tests.conftest import ALL, DEADLINE
from tests.unit.host.call_parties import RecordingHolder
from tests.unit.host.stub_peer import PeerLauncher, initialize_message, stub_pool
from tests.waiting import eventually

OWN_ARENA = -1
"""Stands for the number of the stub's arena, which is known once the stub runs."""


@dataclass(frozen=True)
class Execute:
    """The host runs a batch with inputs of these sizes, at once or after the batches before it."""

    sizes: tuple[int, ...]
    queued: bool = False


@dataclass(frozen=True)
class CancelCall:
    """The caller of the call with this number in the order of their starts goes away."""

    number: int


@dataclass(frozen=True)
class ReleaseInputs:
    """A part of a frame: the stub releases the blocks of the inputs of a batch."""

    batch: int


@dataclass(frozen=True)
class Frame:
    """The stub sends a frame."""

    parts: tuple[m.ToHost | ReleaseInputs, ...]


Step = Execute | CancelCall | Frame
Event = tuple[object, ...]


@dataclass
class Effects:
    """The events of a run; times and tensors by value, calls and batches by number."""

    events: list[Event] = field(default_factory=list)
    reports: list[Event] = field(default_factory=list)
    """Counted batches."""
    calls: list[Event] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    sent: list[m.ToStub] = field(default_factory=list)
    state: Event = ()
    """Whether a batch runs, whether none is in progress, and the bytes of the host's arena."""
    killed: bool = True
    """Whether the stub was killed, as it broke the protocol."""


class Run(logging.Handler):
    """One instance, which executes the steps and records their effects."""

    def __init__(self, instance: Instance, launcher: PeerLauncher) -> None:
        super().__init__()
        self.effects = Effects()
        self.instance = instance
        self.peer = launcher.peers[0]
        self.started: list[Call] = []
        self.waiting: deque[tuple[int, ...]] = deque()
        self.blocks: dict[int, list[tuple[int, int, int]]] = {}
        instance.session.bls_requests.start_request = self.asked  # type: ignore[method-assign]

    def emit(self, record: logging.LogRecord) -> None:
        self.effects.log.append(record.getMessage())

    def step(self, step: Step) -> None:
        if isinstance(step, CancelCall):
            if step.number < len(self.started):
                self.started[step.number].cancel()
        elif isinstance(step, Frame):
            self.send(step)
        elif step.queued:
            self.waiting.append(step.sizes)
        else:
            self.execute(step.sizes)

    def execute(self, sizes: Sequence[int]) -> None:
        calls: list[Call] = []
        for size in sizes:
            tensor = Tensor("x", "UINT8", [size], b"i" * size)
            call = Call(InferRequest("m", [tensor], id=str(len(self.started))))
            number = len(self.started)
            call.holder = RecordingHolder(True, self.cancel)
            call.subscribe(partial(self.responded, number), partial(self.event, "computed", number))
            self.started.append(call)
            calls.append(call)
        batch = Batch(calls, self.released, self.done, self.report)
        tensors = [tensor for call in calls for tensor in call.request.inputs]
        self.instance.session.run_batch(batch)
        self.blocks[batch.number] = [
            (tensor.owner.arena, tensor.owner.offset, 1)  # type: ignore[attr-defined]
            for tensor in tensors
            if tensor.owner is not None
        ]

    def send(self, frame: Frame) -> None:
        if self.instance.exit_reason or not self.instance.serving:
            return
        messages = [
            m.BlockRelease(self.blocks.get(part.batch, []))
            if isinstance(part, ReleaseInputs)
            else self.with_own_arena(part)
            for part in frame.parts
        ]
        self.peer.send(*messages)
        self.instance.read_announced()

    def with_own_arena(self, message: m.ToHost) -> m.ToHost:
        if not isinstance(message, m.Response) or message.response is None:
            return message
        outputs = [
            WireTensor(t.name, t.code, t.shape, t.data, self.peer.spawn.arena, t.offset, t.size)
            if t.arena == OWN_ARENA
            else t
            for t in message.response.outputs
        ]
        response = WireResponse(outputs, message.response.parameters, message.response.error)
        return m.Response(message.batch, message.index, response, message.final)

    def cancel(self, call: Call) -> None:
        self.instance.session.cancel_call(call)

    # Effects

    def event(self, *event: object) -> None:
        self.effects.events.append(event)

    def responded(self, number: int, response: InferResponse | None, final: bool) -> None:
        self.event("response", number, final, response and self.by_value(response))

    def by_value(self, response: InferResponse) -> Event:
        error = response.error and (response.error.code, response.error.message)
        outputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in response.outputs]
        return response.model_version, response.id, outputs, response.parameters, error

    def asked(self, bls_request: BlsRequest) -> None:
        inputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in bls_request.request.inputs]
        batch, flags = bls_request.batch_number, (bls_request.blocking, bls_request.decoupled)
        self.event(
            "asked", bls_request.number, bls_request.request.model_name, inputs, batch, flags
        )

    def done(self, batch: Batch, times: ExecutionTimes | None, released: bool) -> None:
        self.event("done", times)
        if released:
            self.released()

    def released(self) -> None:
        self.event("released")
        if self.waiting:
            self.execute(self.waiting.popleft())

    def report(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if batch.times is not None:
                self.effects.reports.append((batch.number, batch.times, tuple(batch.deferred)))

    async def finish(self) -> Effects:
        instance = self.instance
        if instance.serving:
            self.effects.killed = False
            self.peer.exit()
        await eventually(lambda: bool(instance.exit_reason), "the end of the process")
        self.effects.calls = [(call.finished, call.failed, call.cancelled) for call in self.started]
        arena = instance._services.arenas.host
        arena.trim()
        self.effects.state = (instance.session.running, instance.session.idle, arena.used)
        return self.effects


async def run(steps: Sequence[Step], decoupled: bool) -> Effects:
    launcher = PeerLauncher()
    async with stub_pool(launcher) as pool:
        instance = await pool.start_instance(Label("m", 1, "m_0"))
        await instance.initialize(initialize_message(decoupled=decoupled))
        running = Run(instance, launcher)
        log = logging.getLogger("pbhost")
        log.addHandler(running)
        try:
            for step in steps:
                running.step(step)
            return await asyncio.wait_for(running.finish(), DEADLINE)
        finally:
            log.removeHandler(running)


def effects_of(steps: Sequence[Step], decoupled: bool = False) -> Effects:
    return asyncio.run(run(steps, decoupled))


LARGE = 2 * INLINE_LIMIT

sizes = st.sampled_from([1, 1, LARGE])
numbers = st.integers(1, 4)
first_numbers = st.sampled_from([1, 1, 1, 2])
indexes = st.integers(-1, 2)
index_tuples = st.lists(indexes, max_size=2).map(tuple)
outputs = st.one_of(
    st.builds(WireTensor, st.just("y"), st.just(2), st.just([3]), st.just(b"out")),
    st.just(WireTensor("y", 2, [8], None, OWN_ARENA, 0, 8)),
    st.sampled_from(
        [
            WireTensor("y", 99, [0], b""),  # no such data type
            WireTensor("y", 2, [8], None, 0, 0, 8),  # no block of this size was sent
            WireTensor("y", 2, [LARGE], None, 0, 0, LARGE),
        ]
    ),
)
responses = st.one_of(
    st.none(),
    st.builds(WireResponse, st.lists(outputs, max_size=2), st.just({"p": 1})),
    st.builds(
        WireResponse,
        st.just([]),
        st.just({}),
        st.builds(WireError, st.integers(0, 9), st.just("e")),
    ),
)
bls_requests = st.builds(
    m.BlsRequest,
    numbers,
    st.builds(
        lambda inputs: WireRequest("", inputs, [], {}, model="other"),
        st.lists(outputs.filter(lambda tensor: tensor.arena != OWN_ARENA), max_size=2),
    ),
    numbers,
    st.booleans(),
    st.booleans(),
)
starts = st.sampled_from([10, 10, 10, 0])
failures = st.sampled_from([None, None, "it failed"])
parts: st.SearchStrategy[m.ToHost | ReleaseInputs] = st.one_of(
    st.builds(m.Response, numbers, indexes, responses, st.booleans()),
    st.builds(
        m.BatchDone, numbers, starts, *map(st.just, (11, 13, 16)), failures, index_tuples,
        index_tuples,
    ),
    bls_requests,
    st.builds(ReleaseInputs, numbers),
    st.builds(m.BlockRelease, st.just([(0, 1, 1)])),  # not a block
    st.builds(m.InstanceReleased, numbers),
    st.builds(m.LogLine, st.just(0), st.just("f"), st.just(1), st.just("line"), numbers),
)  # fmt: skip


# What a frame may have in place of the value of the most frequent one.
DEVIATIONS: dict[str, st.SearchStrategy[object]] = {
    "nothing": st.none(),
    "index": indexes,
    "final": st.just(False),
    "end_batch": numbers,
    "started": st.just(0),
    "failure": st.just("it failed"),
    "deferred": index_tuples,
    "rescheduled": index_tuples,
    "third": st.one_of(parts, parts),
    "second": parts,
    "first": parts,
}


@st.composite
def nearly_single_responses(draw: st.DrawFn) -> Frame:
    """The most frequent frame, or one that differs from it in one place."""
    batch = draw(first_numbers)
    kind = draw(st.sampled_from(list(DEVIATIONS)))
    other: Any = draw(DEVIATIONS[kind])

    def value(name: str, usual: Any) -> Any:
        return other if kind == name else usual

    frame = [
        value("first", m.Response(batch, value("index", 0), draw(responses), value("final", True))),
        value(
            "second",
            m.BatchDone(
                value("end_batch", batch), value("started", 10), 11, 13, 16,
                value("failure", None), value("deferred", ()), value("rescheduled", ()),
            ),
        ),
    ]  # fmt: skip
    if kind == "third" or draw(st.booleans()):
        frame.append(value("third", ReleaseInputs(batch)))
    return Frame(tuple(frame))


frames = st.lists(parts, max_size=5).map(tuple).map(Frame)
executes = st.builds(
    Execute, st.lists(sizes, min_size=1, max_size=3).map(tuple) | sizes.map(lambda s: (s,)),
    st.booleans(),
)  # fmt: skip
preparations: st.SearchStrategy[Step] = st.one_of(
    executes,
    st.builds(CancelCall, st.integers(0, 2)),
    st.builds(m.InstanceReleased, first_numbers).map(lambda released: Frame((released,))),
    st.builds(m.Response, first_numbers, st.integers(0, 1), responses, st.booleans()).map(
        lambda response: Frame((response,))
    ),
    st.builds(
        m.BatchDone, first_numbers, *map(st.just, (10, 11, 13, 16)), st.none(), st.just((0,))
    ).map(lambda end: Frame((end,))),
)
steps_of_a_run: st.SearchStrategy[list[Step]] = st.builds(
    lambda sizes, prepared, nearly, rest: [Execute(sizes), *prepared, nearly, *rest],
    st.sampled_from([(1,), (1,), (LARGE,), (1, 1)]),
    st.lists(preparations, max_size=2),
    nearly_single_responses(),
    st.lists(
        st.one_of(
            executes,
            frames,
            nearly_single_responses(),
            bls_requests.map(lambda request: Frame((request,))),
        ),
        max_size=3,
    ),
)

OUTPUT = WireResponse([WireTensor("y", 2, [3], b"out")], {})
ANSWER = m.Response(1, 0, OUTPUT)
DONE = m.BatchDone(1, 10, 11, 13, 16)
ASKED = m.BlsRequest(1, WireRequest("", OUTPUT.outputs, [], {}, model="other"), 1, True)


@given(steps_of_a_run, st.booleans())
@example([Execute((1,)), Frame((ANSWER, DONE))], False)
@example([Execute((LARGE,)), Frame((ANSWER, DONE, ReleaseInputs(1)))], False)
@example([Execute((1,)), Execute((1,), True), Frame((ANSWER, DONE))], False)
@example([Execute((1,)), Frame((ANSWER, DONE, m.BlockRelease([(0, 1, 1)])))], False)
@example([Execute((1,)), Frame((ASKED,)), Frame((ANSWER, DONE))], False)
@example([Execute((1,)), Frame((ANSWER,)), Frame((ANSWER, DONE))], False)
@example([Execute((1,)), Execute((1,)), Frame((m.Response(2, 0, OUTPUT), DONE))], False)
@settings(max_examples=300 if ALL else 100)
def test_any_frames_leave_every_call_ended_once_and_every_batch_counted_at_most_once(
    steps: list[Step], decoupled: bool
) -> None:
    effects = effects_of(steps, decoupled)
    assert not any("unexpected failure" in line for line in effects.log)
    ends = Counter(event[1] for event in effects.events if event[0] == "response" and event[2])
    assert ends == Counter(range(len(effects.calls)))
    counted = [number for number, *_ in effects.reports]
    assert len(counted) == len(set(counted))
    assert effects.state == (False, True, 0)
    lost = [event for event in effects.events if event[0] == "done"]
    assert len(lost) <= len(effects.calls)


def test_every_call_ends_when_its_stub_breaks_the_protocol_at_the_end_of_its_batch() -> None:
    broken = m.BlockRelease([(0, 1, 1)])
    deferred = m.BatchDone(1, 10, 11, 13, 16, None, (0,))
    unknown_error = m.Response(1, 0, WireResponse([], {}, WireError(99, "e")))
    for frame in (
        (ANSWER, DONE, broken),
        (ANSWER, DONE, broken, broken),
        (DONE, broken),
        (deferred, ANSWER, broken),
        (deferred, unknown_error),
        (m.BatchDone(1, 10, 11, 13, 16, None, (), (5,)),),
        (m.BatchDone(1, 10, 11, 13, 16, None, (5,)),),
    ):
        effects = effects_of([Execute((1,)), Frame(frame)])
        assert effects.killed and [finished for finished, *_ in effects.calls] == [True], frame

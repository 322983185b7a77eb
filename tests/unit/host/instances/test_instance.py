"""One instance, from the start of its process to its end, with a peer for its stub."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Awaitable, Callable, Sequence

import pytest

from host.errors import ErrorCode, HostError
from host.inference.call import Batch, Call
from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor
from host.instances.instance import Instance
from host.instances.pool import StubPool
from host.logs.formats import Label
from stub.wire import messages as m
from stub.wire.messages import WireRequest, WireResponse
from tests.conftest import DEADLINE
from tests.descriptors import descriptors
from tests.unit.host.call_parties import RecordingHolder
from tests.unit.host.stub_peer import (
    ARENA_LIMIT,
    SOURCE,
    PeerLauncher,
    StubPeer,
    echo,
    initialize_message,
    stub_pool,
    well_behaved,
)
from tests.waiting import eventually


class Setup:
    """A pool with one kind of peer, and the instance of the test."""

    def __init__(self, pool: StubPool, launcher: PeerLauncher) -> None:
        self.pool = pool
        self.launcher = launcher
        self.exits: list[str] = []

    async def start(self, initialized: bool = True) -> Instance:
        instance = await self.pool.start_instance(Label("m", 1, "m_0"))
        instance.on_unexpected_exit = self.exits.append
        if initialized:
            await instance.initialize(initialize_message())
        return instance

    @property
    def peer(self) -> StubPeer:
        return self.launcher.peers[-1]


def with_peer(
    test: Callable[[Setup], Awaitable[None]],
    script: Callable[[StubPeer, m.ToStub], Sequence[m.ToHost]] = echo,
) -> None:
    async def main() -> None:
        launcher = PeerLauncher(script)
        async with stub_pool(launcher) as pool:
            await asyncio.wait_for(test(Setup(pool, launcher)), DEADLINE)

    asyncio.run(main())


def execute(instance: Instance, *inputs: bytes) -> list[Call]:
    calls = [Call(InferRequest("m", [Tensor("x", "UINT8", [len(v)], v)])) for v in inputs]
    for call in calls:
        call.holder = RecordingHolder(True, instance.session.cancel_call)
    instance.session.run_batch(Batch(calls, lambda: None, lambda *end: None, lambda batches: None))
    return calls


async def refusal(call: Awaitable[object]) -> HostError:
    with pytest.raises(HostError) as caught:
        await call
    return caught.value


def data(response: InferResponse) -> bytes:
    return bytes(response.outputs[0].data)


def test_batch_is_sent_to_the_stub_and_its_responses_come_back() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        assert instance.serving
        calls = execute(instance, b"a", b"bc")
        assert [data(await call) for call in calls] == [b"a", b"bc"]
        (sent,) = await setup.peer.receives(m.Execute)
        assert isinstance(sent, m.Execute) and sent.batch == 1

    with_peer(test)


def test_stub_becomes_the_instance_that_the_message_describes() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start(initialized=False)
        assert not instance.serving
        await instance.initialize(initialize_message("m_7", decoupled=True))
        assert setup.peer.received == [initialize_message("m_7", decoupled=True)]
        session = instance.session
        assert (session.name, session.version, session.decoupled) == ("m_7", 1, True)

    with_peer(test)


def test_completed_configuration_is_that_of_the_model() -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        assert isinstance(message, m.AutoComplete)
        return [m.AutoCompleted(f"completed {message.config}")]

    async def test(setup: Setup) -> None:
        instance = await setup.start(initialized=False)
        assert await instance.auto_complete(SOURCE, "{}") == "completed {}"

    with_peer(test, script)


def test_failed_initialization_has_the_text_of_the_model() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start(initialized=False)
        error = await refusal(instance.initialize(initialize_message()))
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "NameError: x")

    with_peer(test, lambda peer, message: [m.LoadFailed("NameError: x")])


def test_process_that_ends_during_initialization_fails_it() -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        peer.exit()
        return []

    async def test(setup: Setup) -> None:
        instance = await setup.start(initialized=False)
        error = await refusal(instance.initialize(initialize_message()))
        assert error.message == "Stub process 'm_0' is not healthy. It exited with status 0."
        assert not instance.killed_by_signal

    with_peer(test, script)


def test_stub_that_does_not_answer_in_time_fails_the_load() -> None:
    async def test(setup: Setup) -> None:
        setup.pool.load_seconds = 0.01
        instance = await setup.start(initialized=False)
        error = await refusal(instance.initialize(initialize_message()))
        assert "did not respond within 0.01 s while initializing" in error.message

    with_peer(test, lambda peer, message: [])


def test_call_that_does_not_fit_into_memory_fails_and_the_others_run() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        large, small = execute(instance, bytes(ARENA_LIMIT + 1), b"small")
        assert data(await small) == b"small"
        error = await refusal(large)
        assert error.message.startswith("Failed to increase the shared memory pool size")
        (sent,) = await setup.peer.receives(m.Execute)
        assert isinstance(sent, m.Execute) and len(sent.requests) == 1

    with_peer(test)


def test_batch_of_which_nothing_fits_into_memory_is_not_sent_and_ends() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        events: list[object] = []
        call = Call(InferRequest("m", [Tensor("x", "UINT8", [1], bytes(ARENA_LIMIT + 1))]))
        instance.session.run_batch(
            Batch(
                [call],
                lambda: None,
                lambda batch, times, released: events.append(("done", released)),
                lambda batches: events.append("counted"),
            )
        )
        assert events == []  # the scheduler that called `run_batch` gets no call back from inside
        await refusal(call)
        await eventually(lambda: events == [("done", True)], "the end of the batch")
        assert not any(isinstance(message, m.Execute) for message in setup.peer.received)

    with_peer(test)


def test_prefetched_batch_that_cannot_be_sent_does_not_free_the_instance() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        events: list[str] = []

        def batch(datatype: str, name: str) -> tuple[Batch, Call]:
            call = Call(InferRequest("m", [Tensor("x", datatype, [1], b"a")]))

            def done(batch: Batch, times: ExecutionTimes | None, released: bool) -> None:
                events.append(f"{name} done")
                if released:
                    events.append(f"{name} released")

            return Batch([call], lambda: None, done, lambda *end: None), call

        first, second, third = (
            batch(datatype, name)
            for datatype, name in (
                ("NO_SUCH_TYPE", "started"),
                ("NO_SUCH_TYPE", "prefetched"),
                ("UINT8", "sent"),
            )
        )
        for one, _ in (first, second, third):
            instance.session.run_batch(one)
        assert first[1].finished and second[1].finished and events == []
        assert data(await third[1]) == b"a"
        assert events == ["started done", "started released", "sent done", "sent released"]

    with_peer(test)


def test_killed_process_fails_its_calls_and_is_reported() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        (call,) = execute(instance, b"a")
        await setup.peer.receives(m.Execute)
        setup.peer.process.kill()
        error = await refusal(call)
        reason = "Stub process 'm_0' is not healthy. It was ended by SIGKILL"
        assert (error.code, error.message) == (
            ErrorCode.UNAVAILABLE,
            f"{reason} while it ran this request.",
        )
        assert instance.killed_by_signal and instance.exit_reason == reason
        assert setup.exits == [reason] and not instance.serving
        (later,) = execute(instance, b"b")
        error = await refusal(later)
        assert error.message == f"{reason} before it had begun with this request."

    with_peer(test, well_behaved)


def test_failure_to_read_the_last_messages_of_a_process_keeps_no_call_from_its_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("unreadable")

    async def test(setup: Setup) -> None:
        instance = await setup.start()
        (call,) = execute(instance, b"a")
        await setup.peer.receives(m.Execute)
        monkeypatch.setattr(instance.session.link, "read_announced", fail)
        setup.peer.process.kill()
        error = await refusal(call)
        assert error.code is ErrorCode.UNAVAILABLE and len(setup.exits) == 1
        assert "unexpected failure" in caplog.messages

    with_peer(test, well_behaved)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1 no message",
        m.encode([m.BatchDone(7, 1, 2, 3, 4)]),
        m.encode([m.Hello()]),
        m.encode([m.BlockRelease([(0, 4096, 1)])]),
    ],
    ids=["undecodable", "unknown batch", "out of order", "unknown block"],
)
def test_stub_that_breaks_the_protocol_is_killed_and_its_calls_fail(
    frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        (call,) = execute(instance, b"a")
        await setup.peer.receives(m.Execute)
        setup.peer.send_raw(frame)
        error = await refusal(call)
        assert error.code is ErrorCode.UNAVAILABLE
        assert instance.killed_by_signal and len(setup.exits) == 1
        assert sum("the stub broke the protocol" in line for line in caplog.messages) == 1

    with_peer(test, well_behaved)


def test_cancellation_reaches_the_stub() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        _, call = execute(instance, b"a", b"b")
        call.cancel()
        assert await setup.peer.receives(m.CancelRequest) == [m.CancelRequest(1, 1)]

    with_peer(test, well_behaved)


def test_stop_waits_for_running_work_and_then_finalizes() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        (call,) = execute(instance, b"a")
        await setup.peer.receives(m.Execute)
        stopping = asyncio.ensure_future(instance.stop(DEADLINE, DEADLINE))
        await asyncio.sleep(0)
        assert not any(isinstance(message, m.Finalize) for message in setup.peer.received)
        setup.peer.send(m.Response(1, 0, WireResponse([], {})), m.BatchDone(1, 1, 2, 3, 4))
        await stopping
        assert (await call).error is None
        assert isinstance(setup.peer.received[-1], m.Finalize)
        assert instance.exit_reason.endswith("It exited with status 0") and setup.exits == []

    with_peer(test, well_behaved)


def test_stop_kills_a_process_with_work_that_outlasts_the_grace_period() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        (call,) = execute(instance, b"a")
        await instance.stop(0.01, DEADLINE)
        assert (await refusal(call)).code is ErrorCode.UNAVAILABLE
        assert instance.killed_by_signal and setup.exits == []
        assert not any(isinstance(message, m.Finalize) for message in setup.peer.received)

    with_peer(test, well_behaved)


def test_stop_kills_a_process_whose_model_does_not_finalize(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        return [] if isinstance(message, m.Finalize) else well_behaved(peer, message)

    async def test(setup: Setup) -> None:
        instance = await setup.start()
        await instance.stop(0, 0.01)
        assert instance.killed_by_signal
        assert any(line.startswith("finalize: Stub process") for line in caplog.messages)

    with_peer(test, script)


def test_error_of_finalize_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Finalize):
            return [m.Finalized("ValueError: at the end")]
        return well_behaved(peer, message)

    async def test(setup: Setup) -> None:
        caplog.set_level("INFO", "pbhost")
        instance = await setup.start()
        await instance.stop(0, DEADLINE)
        assert "ValueError: at the end" in caplog.messages

    with_peer(test, script)


def test_cancelled_start_ends_the_process() -> None:
    async def test(setup: Setup) -> None:
        starting = asyncio.ensure_future(setup.start(initialized=False))
        await setup.launcher.launched.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await eventually(lambda: setup.peer.process.returncode is not None, "its end")

    with_peer(test)


def test_process_that_cannot_be_started_leaves_no_descriptor_open() -> None:
    async def test(setup: Setup) -> None:
        await setup.start()
        before = descriptors()
        setup.launcher.refuses = errno.EAGAIN
        text = (await refusal(setup.start())).message
        assert "cannot start a stub process for 'm:1/m_0'" in text

        def left() -> set[tuple[int, str]]:
            gc.collect()  # the traceback of the error refers to the arena
            return descriptors() - before

        await eventually(lambda: not left(), "the descriptors to be closed", 10, left)

    with_peer(test)


def test_readiness_is_what_the_model_says() -> None:
    results = [m.ReadinessResult(1, True, ""), m.ReadinessResult(2, False, "it warms up")]

    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Initialize):
            return [m.Initialized(defines_is_ready=True)]
        if isinstance(message, m.CheckReady):
            return [results[message.number - 1]]
        return well_behaved(peer, message)

    async def test(setup: Setup) -> None:
        instance = await setup.start()
        assert instance.readiness_check.model_defines_is_ready
        assert await instance.readiness_check.check() == ""
        assert await instance.readiness_check.check() == "it warms up"

    with_peer(test, script)


@pytest.mark.parametrize("blocking", [True, False])
def test_bls_request_that_cannot_start_is_answered_with_an_error(blocking: bool) -> None:
    async def test(setup: Setup) -> None:
        await setup.start()
        setup.peer.send(m.BlsRequest(5, WireRequest("", [], [], {}, model="other"), 0, blocking))
        (answer,) = await setup.peer.receives(m.BlsResponse)
        assert isinstance(answer, m.BlsResponse) and answer.number == 5 and answer.final
        assert answer.response is not None and answer.response.error is not None
        assert "Server not ready" in answer.response.error.message

    with_peer(test)


def test_metrics_of_the_model_are_kept_by_the_host_and_gone_with_the_process() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        setup.peer.send(m.NewMetricFamily(1, 10, "family", "text", 0))
        setup.peer.send(m.NewMetric(2, 11, 10, {}, None))
        setup.peer.send(m.ChangeMetric(11, "increment", 2.5))
        setup.peer.send(m.ReadMetric(3, 11))
        replies = await setup.peer.receives(m.HostReply, 3)
        assert replies == [m.HostReply(1, None), m.HostReply(2, None), m.HostReply(3, None, 2.5)]
        metrics = setup.pool.metrics
        assert [len(family.samples) for family in metrics.collect()] == [1]
        await instance.stop(0, DEADLINE)
        assert [family.samples for family in metrics.collect()] == [[]]

    with_peer(test)


def test_log_lines_of_the_model_get_to_the_log_with_their_levels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(setup: Setup) -> None:
        await setup.start()
        setup.peer.send(m.LogLine(1, "model.py", 7, "careful"))
        setup.peer.send(m.LogLine(2, "model.py", 8, "too late"))
        await eventually(lambda: "too late" in caplog.messages, "the second line")
        found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "pbhost"]
        assert found == [("WARNING", "careful"), ("ERROR", "too late")]

    with_peer(test)


class DefectiveCall(Call):
    """A call with a defect: its responses cannot be prepared."""

    prepares_responses = True

    def prepare_response(self, response: InferResponse) -> None:
        raise AttributeError("a defect")


@pytest.mark.parametrize("prefix", [[], [m.BlockRelease([]), m.BlockRelease([])]])
def test_defect_while_a_frame_is_handled_ends_the_calls_of_the_stub_with_an_internal_error(
    prefix: list[m.ToHost], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        calls: list[Call] = [
            DefectiveCall(InferRequest("m", [Tensor("x", "UINT8", [1], b"a")])),
            *([Call(InferRequest("m", [Tensor("x", "UINT8", [1], b"b")]))] if prefix else []),
        ]
        instance.session.run_batch(
            Batch(calls, lambda: None, lambda *end: None, lambda batches: None)
        )
        await setup.peer.receives(m.Execute)
        response = m.Response(1, 0, WireResponse([], {}))
        setup.peer.send_raw(m.encode([*prefix, response, m.BatchDone(1, 1, 2, 3, 4)]))
        for call in calls:
            error = await refusal(call)
            assert error.code is ErrorCode.INTERNAL
            assert error.message == "unexpected failure: AttributeError"
        await eventually(lambda: bool(setup.exits), "the end of the stub")
        (record,) = [r for r in caplog.records if r.exc_info]
        assert record.getMessage().startswith("unexpected failure while messages of the stub")

    with_peer(test, well_behaved)


def test_request_that_cannot_be_encoded_fails_with_an_internal_error_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        broken = Tensor("x", "NO_SUCH_TYPE", [1], b"a")
        calls = [
            Call(InferRequest("m", [broken])),
            Call(InferRequest("m", [Tensor("x", "UINT8", [1], b"b")])),
        ]
        instance.session.run_batch(
            Batch(calls, lambda: None, lambda *end: None, lambda batches: None)
        )
        error = await refusal(calls[0])
        assert error.code is ErrorCode.INTERNAL
        assert data(await calls[1]) == b"b"
        assert any(record.exc_info for record in caplog.records)

    with_peer(test)


def test_arena_is_announced_although_no_request_of_its_batch_can_be_encoded() -> None:
    async def test(setup: Setup) -> None:
        instance = await setup.start()
        other = setup.pool.arenas.create_arena()
        block = other.block(0, 8)
        foreign = Tensor("x", "UINT8", [8], block.data, block)
        broken = Tensor("x", "NO_SUCH_TYPE", [1], b"a")
        for inputs in ([foreign, broken], [foreign]):
            call = Call(InferRequest("m", inputs))
            instance.session.run_batch(
                Batch([call], lambda: None, lambda *end: None, lambda batches: None)
            )
        await setup.peer.receives(m.Execute)
        announced = [one.arena for one in setup.peer.received if isinstance(one, m.OpenArena)]
        assert announced == [other.number]

    with_peer(test, well_behaved)


def test_the_group_of_a_process_that_leads_none_is_neither_watched_nor_killed() -> None:
    """A bound function runs in the caller's process, whose group is not the host's to kill."""

    async def test(setup: Setup) -> None:
        reaper = setup.pool.process_reaper
        await setup.start()
        assert reaper._groups == set()
        setup.peer.exit()
        await eventually(lambda: bool(setup.exits), "the end of the process")
        assert reaper._unconfirmed == set()

    with_peer(test)

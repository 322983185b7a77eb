"""Loads of one version: completion, initialization, and the state after a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from stub.wire import messages as m
from tests.conftest import RepositoryBuilder
from tests.unit.host.models.loading_setup import (
    LoadingSetup,
    completed,
    refusal,
    send_request,
    with_loader,
)
from tests.unit.host.stub_peer import StubPeer, echo
from tests.waiting import eventually

THREE = 'instance_group { name: "g" count: 3 kind: KIND_CPU }'


def test_every_instance_is_initialized_and_the_model_answers(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(THREE)
        assert sorted(setup.initialized()) == ["g_0", "g_1", "g_2"]
        assert model.ready and len(model.supervisors) == 3
        assert await send_request(model) == b"abc"
        assert model.metrics.load_seconds > 0

    with_loader(repository, test)


def test_instance_gets_the_arguments_of_its_model(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        await setup.load("model_transaction_policy { decoupled: true }")
        (message,) = setup.initializations()
        assert message.source == m.ModelSource(str(setup.directory), 1, "model.py")
        assert (message.outputs, message.decoupled) == (["y"], True)
        assert (message.max_outstanding_responses, message.send_timeout) == (7, 8.0)
        config = json.loads(message.args.pop("model_config"))
        assert config["name"] == "m"
        assert message.args == {
            "model_repository": str(setup.directory),
            "model_version": "1",
            "model_name": "m",
            "model_instance_kind": "CPU",
            "model_instance_name": message.instance_name,
            "model_instance_device_id": "0",
        }

    with_loader(repository, test)


def test_stub_whose_model_completes_nothing_becomes_an_instance(
    repository: RepositoryBuilder,
) -> None:
    async def test(setup: LoadingSetup) -> None:
        await setup.load(THREE)
        first, *others = setup.launcher.peers
        assert [type(message) for message in first.received] == [m.AutoComplete, m.Initialize]
        assert [len(peer.received) for peer in others] == [1, 1]

    with_loader(repository, test, auto_complete=True)


def test_stub_whose_model_completes_something_is_replaced(repository: RepositoryBuilder) -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.AutoComplete):
            return [m.AutoCompleted(completed(max_batch_size=4))]
        return echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(THREE)
        assert model.config.max_batch_size == 4
        first, *others = setup.launcher.peers
        assert [type(message) for message in first.received] == [m.AutoComplete, m.Finalize]
        await eventually(lambda: first not in setup.alive(), "the end of the first stub")
        assert [type(peer.received[0]) for peer in others] == [m.Initialize] * 3

    with_loader(repository, test, script, auto_complete=True)


def test_failed_completion_fails_the_load_and_leaves_no_process(
    repository: RepositoryBuilder,
) -> None:
    async def test(setup: LoadingSetup) -> None:
        assert await refusal(setup.load(THREE)) == "SyntaxError: x"
        assert setup.initialized() == []
        await setup.no_process_is_left()

    with_loader(repository, test, lambda *_: [m.LoadFailed("SyntaxError: x")], auto_complete=True)


def test_wrong_completion_fails_the_load_and_leaves_no_process(
    repository: RepositoryBuilder,
) -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        return [m.AutoCompleted(completed(max_batch_size=-1))]

    async def test(setup: LoadingSetup) -> None:
        assert "max_batch_size" in await refusal(setup.load())
        await setup.no_process_is_left()

    with_loader(repository, test, script, auto_complete=True)


def test_instance_that_fails_to_initialize_ends_the_others(repository: RepositoryBuilder) -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Initialize) and message.instance_name == "g_1":
            return [m.LoadFailed("no weights")]
        return echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        assert await refusal(setup.load(THREE)) == "no weights"
        assert len(setup.launcher.peers) == 3
        await setup.no_process_is_left()

    with_loader(repository, test, script)


def test_cancelled_load_leaves_no_process(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        loading = asyncio.ensure_future(setup.load(THREE))
        await eventually(lambda: len(setup.initialized()) == 3, "the initializations")
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await setup.no_process_is_left()

    with_loader(repository, test, lambda *_: [])


@pytest.mark.parametrize(("setting", "together"), [("0", 1), ("1", 3)])
def test_instances_initialize_one_after_the_other_if_the_environment_says_so(
    repository: RepositoryBuilder,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    together: int,
) -> None:
    monkeypatch.setenv("TRITON_PARALLEL_INSTANCE_LOADING", setting)

    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        return [] if isinstance(message, m.Initialize) else echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        loading = asyncio.ensure_future(setup.load(THREE))
        for count in range(together, 4):
            await eventually(lambda count=count: len(setup.initialized()) >= count, "a turn")  # type: ignore[misc]
            assert len(setup.initialized()) == count
            waiting = [peer for peer in setup.launcher.peers if peer.received]
            for peer in waiting if together > 1 else waiting[-1:]:
                peer.send(m.Initialized())
        assert (await loading).ready

    with_loader(repository, test, script)


def test_warmup_runs_on_each_instance_before_it_takes_requests(
    repository: RepositoryBuilder,
) -> None:
    warmup = """
        model_warmup {
            name: "w" batch_size: 1
            inputs { key: "x" value: { data_type: TYPE_UINT8 dims: [ 3 ] zero_data: true } }
        }
    """

    async def test(setup: LoadingSetup) -> None:
        await setup.load(f"{THREE} {warmup}")
        for peer in setup.launcher.peers:
            assert [type(message) for message in peer.received] == [m.Initialize, m.Execute]

    with_loader(repository, test)


def test_failed_warmup_fails_the_load(repository: RepositoryBuilder) -> None:
    warmup = """
        model_warmup {
            name: "w" batch_size: 1
            inputs { key: "x" value: { data_type: TYPE_UINT8 dims: [ 3 ] zero_data: true } }
        }
    """

    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Execute):
            return [m.BatchDone(message.batch, 1, 2, 3, 4, "it broke")]
        return echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        assert "'w'" in await refusal(setup.load(warmup))
        await setup.no_process_is_left()

    with_loader(repository, test, script)

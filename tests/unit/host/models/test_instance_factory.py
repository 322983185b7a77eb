"""Instances of a model that serves: added, removed, replaced, and limited by resources."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from host.errors import HostError
from host.models.instance_factory import InstanceChange
from host.models.loaders import InstanceUpdate
from host.models.python_model import PythonModel
from host.scheduling.rate_limiter import RateLimiter, ResourceLimit
from stub.wire import messages as m
from tests.conftest import DEADLINE, RepositoryBuilder
from tests.unit.host.models.loading_setup import (
    LoadingSetup,
    refusal,
    send_request,
    with_loader,
)
from tests.unit.host.stub_peer import StubPeer, echo
from tests.waiting import eventually


def group(count: int, name: str = "g") -> str:
    return f'instance_group {{ name: "{name}" count: {count} kind: KIND_CPU }}'


async def update(setup: LoadingSetup, model: PythonModel, fields: str) -> InstanceUpdate:
    change = await setup.loader.update(model, setup.config(fields), DEADLINE)
    assert change is not None
    return change


def names(model: PythonModel) -> list[str]:
    return sorted(supervisor.instance.name for supervisor in model.supervisors)


def test_added_instances_start_beside_those_that_stay(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(1))
        change = await update(setup, model, group(3))
        assert len(setup.launcher.peers) == 3
        assert names(model) == ["g_0"]  # the others take no requests yet
        change.commit()
        assert names(model) == ["g_0", "g_1", "g_2"]
        assert model.config.instance_group[0].count == 3
        assert await send_request(model) == b"abc"

    with_loader(repository, test)


def test_surplus_instances_stop_and_the_model_goes_on(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(3))
        change = await update(setup, model, group(1))
        assert len(setup.alive()) == 3
        change.commit()
        assert names(model) == ["g_0"]
        await eventually(lambda: len(setup.alive()) == 1, "the ends of two instances")
        finalized = [
            peer for peer in setup.launcher.peers if isinstance(peer.received[-1], m.Finalize)
        ]
        assert len(finalized) == 2
        assert await send_request(model) == b"abc"

    with_loader(repository, test)


def test_instance_of_a_renamed_group_stays(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(1))
        (await update(setup, model, group(1, "renamed"))).commit()
        assert len(setup.launcher.peers) == 1 and names(model) == ["g_0"]

    with_loader(repository, test)


def test_added_instance_gets_a_name_that_no_other_one_has(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(f"{group(1, 'a')} {group(1, 'b')}")
        (await update(setup, model, group(1, "c"))).commit()
        (await update(setup, model, f"{group(2, 'c')} {group(1, 'a')}")).commit()
        assert len(set(names(model))) == 3

    with_loader(repository, test)


def test_discarded_change_stops_the_new_instances_only(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(1))
        change = await update(setup, model, group(3))
        await change.discard()
        assert len(setup.alive()) == 1 and names(model) == ["g_0"]
        assert model.config.instance_group[0].count == 1
        assert await send_request(model) == b"abc"

    with_loader(repository, test)


def test_change_with_an_instance_that_fails_stops_the_new_instances_before_it(
    repository: RepositoryBuilder,
) -> None:
    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Initialize) and message.instance_name == "g_2":
            return [m.LoadFailed("no memory")]
        return echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(1))
        assert await refusal(update(setup, model, group(4))) == "no memory"
        await eventually(lambda: len(setup.alive()) == 1, "the ends of the new instances")
        assert setup.initialized() == ["g_0", "g_1", "g_2"]
        assert names(model) == ["g_0"] and await send_request(model) == b"abc"

    with_loader(repository, test, script)


def test_dead_instance_is_replaced_by_one_like_it(repository: RepositoryBuilder) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(1))
        setup.launcher.peers[0].process.kill()
        await eventually(lambda: model.supervisors[0].restarts == 1, "another stub")
        first, second = setup.initializations()
        assert first == second
        assert await send_request(model) == b"abc"

    with_loader(repository, test)


def test_replacement_after_a_change_gets_the_changed_configuration(
    repository: RepositoryBuilder,
) -> None:
    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(group(1))
        (await update(setup, model, group(2))).commit()
        setup.launcher.peers[0].process.kill()
        await eventually(lambda: len(setup.initializations()) == 3, "another stub")
        *_, second, third = (i.args["model_config"] for i in setup.initializations())
        assert second == third

    with_loader(repository, test)


LIMITED = """
    instance_group {{
        name: "g" count: {count} kind: KIND_CPU
        rate_limiter {{ resources {{ name: "R" count: {need} }} }}
    }}
"""


def test_instance_that_needs_more_than_there_is_is_refused_and_leaves_no_process(
    repository: RepositoryBuilder,
) -> None:
    limiter = RateLimiter([ResourceLimit("R", 2)])

    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(LIMITED.format(count=1, need=2))
        text = await refusal(update(setup, model, LIMITED.format(count=2, need=3)))
        assert text.startswith('Resource count for "R" is limited to 2')
        assert len(setup.alive()) == 1
        assert await send_request(model) == b"abc"

    with_loader(repository, test, limiter=limiter)


def test_discarded_change_gives_its_permits_back(repository: RepositoryBuilder) -> None:
    limiter = RateLimiter()

    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(LIMITED.format(count=1, need=1))
        change = await update(setup, model, LIMITED.format(count=3, need=1))
        assert isinstance(change, InstanceChange)
        permits = [place.permit for _, place in change.made]
        assert len(permits) == 2 and None not in permits
        await change.discard()
        assert len(limiter._permits) == 1

    with_loader(repository, test, limiter=limiter)


def test_failed_load_gives_its_permits_back(repository: RepositoryBuilder) -> None:
    limiter = RateLimiter()

    async def test(setup: LoadingSetup) -> None:
        with pytest.raises(HostError, match="no weights"):
            await setup.load(LIMITED.format(count=3, need=1))
        assert not limiter._permits

    with_loader(repository, test, lambda *_: [m.LoadFailed("no weights")], limiter=limiter)


def test_refused_plan_gives_back_the_permits_of_the_instances_before_it(
    repository: RepositoryBuilder,
) -> None:
    limiter = RateLimiter([ResourceLimit("R", 2)])

    async def test(setup: LoadingSetup) -> None:
        fields = LIMITED.format(count=2, need=2) + LIMITED.format(count=1, need=3)
        await refusal(setup.load(fields.replace('"g"', '"a"', 1)))
        assert not limiter._permits
        await setup.no_process_is_left()

    with_loader(repository, test, limiter=limiter)


def test_change_with_an_instance_that_fails_gives_its_permits_back(
    repository: RepositoryBuilder,
) -> None:
    limiter = RateLimiter()

    def script(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Initialize) and message.instance_name == "g_2":
            return [m.LoadFailed("no memory")]
        return echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        model = await setup.load(LIMITED.format(count=1, need=1))
        await refusal(update(setup, model, LIMITED.format(count=5, need=1)))
        assert len(limiter._permits) == 1

    with_loader(repository, test, script, limiter=limiter)


def test_a_stub_that_dies_before_its_turn_to_initialize_is_told_by_its_name(
    repository: RepositoryBuilder,
) -> None:
    died = threading.Event()

    def initialize_later(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
        if isinstance(message, m.Initialize):
            assert died.wait(DEADLINE)
        return echo(peer, message)

    async def test(setup: LoadingSetup) -> None:
        limit = 'parameters { key: "MAX_INITIALIZING_INSTANCES" value { string_value: "1" } }'
        loading = asyncio.ensure_future(refusal(setup.load(group(2) + limit)))
        await eventually(
            lambda: len(setup.launcher.peers) == 2 and len(setup.initialized()) == 1,
            "one instance to initialize",
        )
        (waiting,) = [peer for peer in setup.launcher.peers if not has_initialized(peer)]
        waiting.process.kill()
        await eventually(lambda: waiting not in setup.alive(), "the end of the other one")
        died.set()
        (other,) = {"g_0", "g_1"} - set(setup.initialized())
        assert f"Stub process '{other}' is not healthy" in await loading

    with_loader(repository, test, initialize_later)


def has_initialized(peer: StubPeer) -> bool:
    return any(isinstance(message, m.Initialize) for message in peer.received)

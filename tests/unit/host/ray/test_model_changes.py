"""Loads and unloads of clients, as several replicas carry them out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from host.errors import ErrorCode, HostError
from host.ray.channel_messages import ReplicaMethod
from host.ray.model_changes import Failure, ModelChange, SharedModelControl
from pbhost import Options, Server
from tests.conftest import DEADLINE, RepositoryBuilder

_Result = TypeVar("_Result")

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
CONFIG = """
backend: "python"
input [ { name: "X", data_type: TYPE_FP32, dims: [ 1 ] } ]
output [ { name: "Y", data_type: TYPE_FP32, dims: [ 1 ] } ]
"""
CONFIG_JSON = (
    '{"backend": "python", "max_batch_size": 7,'
    ' "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],'
    ' "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]}'
)


class Deployment:
    """Two servers that know each other as replicas do."""

    def __init__(self, repository: RepositoryBuilder) -> None:
        options = Options(
            model_repository=[str(repository.path)],
            model_control_mode="explicit",
            allow_grpc=False,
            allow_http=False,
            allow_metrics=False,
        )
        self.called: list[tuple[Any, ...]] = []
        self.passed_on = asyncio.Event()
        self.controls = [SharedModelControl(Calls(self, name), 60.0) for name in ("a", "b")]
        self.servers = [Server(options, control_hook=control) for control in self.controls]

    async def start(self, number: int) -> None:
        await self.servers[number].start()
        self.controls[number].server = self.servers[number]
        await self.controls[number].catch_up()

    async def stop(self) -> None:
        for control, server in zip(self.controls, self.servers, strict=True):
            await control.stop()
            await server.stop()

    def ready(self) -> list[list[str]]:
        return [[name for name, _ in one.core.list_ready_versions()] for one in self.servers]


class Calls:
    """Calls the controls that have a server, as `Peers` calls replicas."""

    def __init__(self, deployment: Deployment, own_id: str) -> None:
        self.deployment = deployment
        self.own_id = own_id

    async def call(
        self, method: ReplicaMethod[_Result], *arguments: Any, timeout: float
    ) -> list[_Result]:
        self.deployment.called.append((self.own_id, method.name, *arguments))
        sent = method.decode_arguments(msgspec.msgpack.encode(arguments))
        results = await self._make(method.name, sent)
        return [method.decode_result(msgspec.msgpack.encode(one)) for one in results]

    async def _make(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        controls = [one for one in self.deployment.controls if one.server is not None]
        if name == "list_stamps":
            return [one.list_stamps() for one in controls]
        if name == "send_changes":
            return [one.select_changes(*arguments) for one in controls]
        self.deployment.passed_on.set()
        return list(await asyncio.gather(*(one.apply(*arguments) for one in controls)))


@pytest.fixture
def deployment(repository: RepositoryBuilder) -> Deployment:
    for name in ("one", "other"):
        repository.add(name, MODEL, CONFIG)
    return Deployment(repository)


Scene = Callable[[], Coroutine[Any, Any, None]]


def run(deployment: Deployment, scene: Scene) -> None:
    async def complete() -> None:
        try:
            await scene()
        finally:
            await deployment.stop()

    asyncio.run(complete())


def test_changes_reach_others_and_those_that_start_later(deployment: Deployment) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.servers[0].core.control.load_model("one", {})
        await deployment.start(1)
        assert deployment.ready() == [["one"], ["one"]]
        await deployment.servers[1].core.control.load_model("other", {})
        assert deployment.ready() == [["one", "other"]] * 2
        await deployment.servers[1].core.control.unload_model("one", False)
        assert deployment.ready() == [["other"]] * 2

    run(deployment, scene)


def test_a_load_that_fails_concerns_no_other_replica(deployment: Deployment) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        with pytest.raises(HostError, match="missing"):
            await deployment.servers[0].core.control.load_model("missing", {})
        assert not deployment.controls[1].changes

    run(deployment, scene)


def test_the_failure_of_another_replica_names_it(deployment: Deployment) -> None:
    assert Failure("b", "Not found", "no such model").to_error().message == (
        "replica b: no such model"
    )
    assert Failure("b", "Not found", "no such model").to_error().code is ErrorCode.NOT_FOUND


def test_an_older_change_does_not_undo_a_newer_one(deployment: Deployment) -> None:
    async def scene() -> None:
        await deployment.start(0)
        control = deployment.controls[0]
        assert await control.apply([ModelChange("one", (2, "a"), {})]) is None
        assert await control.apply([ModelChange("one", (1, "b"))]) is None
        assert deployment.servers[0].core.list_ready_versions() == [("one", 1)]
        failed = await control.apply([ModelChange("missing", (3, "a"), {})])
        assert failed is not None and failed.replica == "a"

    run(deployment, scene)


LOADS_OTHER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model("one")
        pb_utils.unload_model("other")

    def execute(self, requests):
        return []
"""


def test_what_a_model_changes_in_initialize_is_done_by_each_replica(
    deployment: Deployment, repository: RepositoryBuilder
) -> None:
    repository.add("parent", LOADS_OTHER, CONFIG)

    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        load = deployment.servers[0].core.control.load_model("parent", {})
        await asyncio.wait_for(load, DEADLINE)
        assert deployment.ready() == [["one", "parent"]] * 2
        assert "one" not in deployment.controls[0].changes

    run(deployment, scene)


UNLOADS_ITSELF = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.unload_model("selfish")

    def execute(self, requests):
        return []
"""


def test_a_model_that_unloads_itself_in_initialize_keeps_no_replica_waiting(
    deployment: Deployment, repository: RepositoryBuilder
) -> None:
    repository.add("selfish", UNLOADS_ITSELF, CONFIG)

    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        loads = [server.core.control.load_model("selfish", {}) for server in deployment.servers]
        ended = asyncio.gather(*loads, return_exceptions=True)
        assert all(isinstance(e, HostError) for e in await asyncio.wait_for(ended, DEADLINE))
        assert deployment.ready() == [[], []]

    run(deployment, scene)


def test_a_health_check_does_not_wait_for_a_load(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        first, second = deployment.controls
        begun, go_on, load = asyncio.Event(), asyncio.Event(), deployment.servers[1].load_model

        async def slow_load(*arguments: Any) -> None:
            begun.set()
            await go_on.wait()
            await load(*arguments)

        monkeypatch.setattr(deployment.servers[1], "load_model", slow_load)
        assert await first.apply([ModelChange("one", (1, "a"), {})]) is None
        assert await asyncio.wait_for(second.start_to_catch_up(), DEADLINE) == 2
        await asyncio.wait_for(begun.wait(), DEADLINE)
        assert await asyncio.wait_for(second.start_to_catch_up(), DEADLINE) == 2
        go_on.set()
        assert second._catching_up is not None
        await asyncio.wait_for(second._catching_up, DEADLINE)
        assert deployment.ready() == [["one"]] * 2
        asked = [method for own_id, method, *_ in deployment.called if own_id == "b"]
        assert asked == ["list_stamps", "list_stamps", "send_changes", "list_stamps"]
        # The contents come from one replica, and only once.
        assert ("b", "send_changes", {"one": "a"}) in deployment.called

    run(deployment, scene)


def test_a_clock_that_is_behind_does_not_undo_a_change(deployment: Deployment) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        ahead = time.time_ns() + 10**15
        for control in deployment.controls:
            assert await control.apply([ModelChange("one", (ahead, "b"), {})]) is None
        await deployment.servers[0].core.control.unload_model("one", False)
        assert deployment.ready() == [[], []]

    run(deployment, scene)


def test_loads_at_two_replicas_at_once_end_with_the_same_one(deployment: Deployment) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        begun, go_on = asyncio.Event(), asyncio.Event()
        earlier = {"config": CONFIG_JSON.replace("7", "5")}

        async def load_here() -> None:
            begun.set()
            await go_on.wait()
            await deployment.servers[0].load_model("one", earlier)

        async def load_later() -> None:
            await begun.wait()
            await deployment.servers[1].core.control.load_model("one", {"config": CONFIG_JSON})

        async def finish_the_earlier() -> None:
            await deployment.passed_on.wait()
            go_on.set()

        loads = (
            deployment.controls[0].load("one", earlier, load_here),
            load_later(),
            finish_the_earlier(),
        )
        await asyncio.wait_for(asyncio.gather(*loads), DEADLINE)
        for server in deployment.servers:
            assert server.core.model_config("one", "").max_batch_size == 7
        assert deployment.controls[0].changes == deployment.controls[1].changes

    run(deployment, scene)


def test_a_later_replica_has_the_configuration_that_a_plain_load_kept(
    deployment: Deployment,
) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.servers[0].core.control.load_model("one", {"config": CONFIG_JSON})
        await deployment.servers[0].core.control.load_model("one", {})
        await deployment.start(1)
        for server in deployment.servers:
            assert server.core.model_config("one", "").max_batch_size == 7

    run(deployment, scene)

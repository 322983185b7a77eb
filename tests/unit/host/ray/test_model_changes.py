"""Loads and unloads of clients, as several replicas carry them out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from host import Options, Server
from host.errors import ErrorCode, HostError
from host.ray.model_changes import Failure, ModelChange, SharedModelControl
from tests.conftest import RepositoryBuilder

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
        self.controls = [SharedModelControl(Calls(self, name), 60.0) for name in ("a", "b")]
        self.servers = [Server(options, control_hook=control) for control in self.controls]

    async def start(self, number: int) -> None:
        await self.servers[number].start()
        self.controls[number].server = self.servers[number]
        await self.controls[number].catch_up()

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop()

    def ready(self) -> list[list[str]]:
        return [[name for name, _ in one.core.list_ready_versions()] for one in self.servers]


class Calls:
    """Calls the controls that have a server, as `Peers` calls replicas."""

    def __init__(self, deployment: Deployment, own_id: str) -> None:
        self.deployment = deployment
        self.own_id = own_id

    async def call(self, method: str, *arguments: Any, timeout: float) -> list[object]:
        controls = [one for one in self.deployment.controls if one.server is not None]
        if method == "list_changes":
            return [list(one.changes.values()) for one in controls]
        return [await one.apply(*arguments) for one in controls]


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
        await deployment.servers[0].core.load_model("one", {})
        await deployment.start(1)
        assert deployment.ready() == [["one"], ["one"]]
        await deployment.servers[1].core.load_model("other", {})
        assert deployment.ready() == [["one", "other"]] * 2
        await deployment.servers[1].core.unload_model("one", False)
        assert deployment.ready() == [["other"]] * 2

    run(deployment, scene)


def test_a_load_that_fails_concerns_no_other_replica(deployment: Deployment) -> None:
    async def scene() -> None:
        await deployment.start(0)
        await deployment.start(1)
        with pytest.raises(HostError, match="missing"):
            await deployment.servers[0].core.load_model("missing", {})
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

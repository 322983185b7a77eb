"""A loader of models whose stubs are peers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from host.config.model_config import ConfigSettings, LoadedConfig, load_config
from host.environments.model_environments import Environments
from host.errors import HostError
from host.inference.request import InferRequest, Tensor
from host.instances.flow_control import FlowControlSettings
from host.models.backends import Backends
from host.models.instance_loader import Loader
from host.models.python_model import PythonModel
from host.scheduling.rate_limiter import RateLimiter
from stub.wire import messages as m
from tests.conftest import DEADLINE, RepositoryBuilder
from tests.unit.host.stub_peer import PeerLauncher, Script, StubPeer, echo, stub_pool
from tests.waiting import eventually

TENSORS = """
    backend: "python"
    input { name: "x" data_type: TYPE_UINT8 dims: [ -1 ] }
    output { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }
"""


class LoadingSetup:
    """A loader, the peers that it has started, and the model `m` on disk."""

    def __init__(self, launcher: PeerLauncher, loader: Loader, repository: RepositoryBuilder):
        self.launcher = launcher
        self.loader = loader
        self._repository = repository
        self._models: list[PythonModel] = []

    def config(self, fields: str = "") -> LoadedConfig:
        """The configuration of `m`, which is written to disk."""
        directory = self._repository.add("m", "x = 1", f"{TENSORS} {fields}")
        return load_config(directory, ConfigSettings())

    @property
    def directory(self) -> Path:
        return self._repository.path / "m"

    async def load(self, fields: str = "") -> PythonModel:
        model = await self.loader.load_version(self.directory, 1, self.config(fields))
        self._models.append(model)
        return model

    async def stop_models(self) -> None:
        for model in self._models:
            await model.stop(0, DEADLINE)

    def initialized(self) -> list[str]:
        """The instances that peers were told to become, in the order of their starts."""
        return [message.instance_name for message in self.initializations()]

    def initializations(self) -> list[m.Initialize]:
        return [
            message
            for peer in self.launcher.peers
            for message in peer.received
            if isinstance(message, m.Initialize)
        ]

    def alive(self) -> list[StubPeer]:
        return [peer for peer in self.launcher.peers if peer.process.returncode is None]

    async def no_process_is_left(self) -> None:
        await eventually(lambda: not self.alive(), "the ends of all processes")


async def send_request(model: PythonModel, value: bytes = b"abc") -> bytes:
    """The model's answer to a request."""
    response = await model.infer(InferRequest("m", [Tensor("x", "UINT8", [len(value)], value)]))
    return bytes(response.outputs[0].data)


async def refusal(work: Awaitable[object]) -> str:
    """The text of the error that this raises."""
    with pytest.raises(HostError) as caught:
        await work
    return caught.value.message


Test = Callable[[LoadingSetup], Awaitable[None]]


def with_loader(
    repository: RepositoryBuilder,
    test: Test,
    script: Script = echo,
    *,
    auto_complete: bool = False,
    limiter: RateLimiter | None = None,
) -> None:
    """Runs a test with a loader."""

    async def main() -> None:
        launcher = PeerLauncher(script)
        environments = Environments(repository.path / "cache", DEADLINE)
        async with stub_pool(launcher) as pool:
            loader = Loader(
                pool,
                Backends(repository.path / "backends"),
                environments,
                auto_complete=auto_complete,
                flow=FlowControlSettings(7, 8.0),
                limiter=limiter,
            )
            setup = LoadingSetup(launcher, loader, repository)
            await asyncio.wait_for(test(setup), DEADLINE)
            await asyncio.wait_for(setup.stop_models(), DEADLINE)
            await setup.no_process_is_left()
        await environments.close()

    asyncio.run(main())


def completed(**fields: object) -> str:
    """The return value of a model's `auto_complete_config`."""
    tensor = {"data_type": "TYPE_UINT8", "dims": [-1]}
    return json.dumps(
        {
            "name": "m",
            "backend": "python",
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
            **fields,
        }
    )

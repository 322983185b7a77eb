"""The remote models that this server has learned of, and how it learns of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from host.errors import unavailable
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest
from host.models.registry import ModelEntry, ModelVersion, OnDemand, Registry, VersionState
from host.remote.provider import RemoteModelProvider, RemoteVersion
from host.remote.remote_model import RemoteModel

_Started = TypeVar("_Started")


class RemoteModels:
    """Enters models of other servers into the registry when they are asked for.

    `timeout`: the most seconds to learn of one. `others`: loads models of this server on demand.
    Belongs to the event loop.
    """

    def __init__(self, provider: RemoteModelProvider, registry: Registry, timeout: float) -> None:
        self._provider = provider
        self._registry = registry
        self._timeout = timeout
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._models: set[RemoteModel] = set()
        self.others: OnDemand | None = None
        """Loads models of this server on demand; None if it does not."""

    def serves(self, name: str) -> bool:
        """Whether the model belongs to another server."""
        return self._provider.serves(name)

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """Learns of the model of a request, then calls `start`; returns its result.

        Raises HostError.
        """
        if self.serves(request.model_name):
            await self.learn(request.model_name)
        elif self.others is not None:
            return await self.others.start_when_loaded(request, start)
        return start()

    async def refresh(self, name: str) -> None:
        """As `learn`, if the model belongs to another server; otherwise does nothing."""
        if self.serves(name):
            await self.learn(name)

    async def refresh_known(self, name: str) -> None:
        """As `learn`, if this server has learned of the model before."""
        if self._registry.is_remote(name):
            await self.learn(name)

    async def learn(self, name: str) -> bool:
        """Asks for the versions of a model; returns whether they have changed. Raises HostError.

        Those who ask at the same time share one answer.
        """
        before = self._registry.versions(name)
        task = self._learning.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._learn(name))
            self._learning[name] = task
            task.add_done_callback(lambda _: self._learning.pop(name, None))
        done, _ = await asyncio.wait([task], timeout=self._timeout)
        if not done:
            raise unavailable(
                f"the server of model '{name}' did not describe it within {self._timeout:g} s"
            )
        if task.cancelled():
            raise unavailable("Server exiting")
        task.result()
        after = self._registry.versions(name)
        return {n: v.model for n, v in before.items()} != {n: v.model for n, v in after.items()}

    async def _learn(self, name: str) -> None:
        described = await self._provider.describe(name)
        known = self._registry.versions(name)
        entry = ModelEntry(reason="" if described else "no version is loaded")
        for one in described:
            old = known[one.version].model if one.version in known else None
            if isinstance(old, RemoteModel) and _is_same(old.described, one):
                old.described = one
                model = old
            else:
                model = RemoteModel(one, self._provider, self._why_not_ready)
            entry.versions[one.version] = ModelVersion(one.version, VersionState.READY, model=model)
            self._models.add(model)
        self._registry.set_remote(name, entry)
        served = {version.model for version in entry.versions.values()}
        self._models = {
            model for model in self._models if model.name != name or model in served or model.in_use
        }

    async def _why_not_ready(self, name: str, version: int) -> str:
        """Asks anew. Raises HostError."""
        await self.learn(name)
        found = self._registry.versions(name).get(version)
        if found is None or not isinstance(found.model, RemoteModel):
            return "its server has unloaded it"
        return found.model.described.reason

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """The statistics of a remote model. Raises HostError."""
        return await self._provider.statistics(name, version)

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The index entries of all remote models. Raises HostError."""
        return await self._provider.index(ready)

    async def ready(self) -> bool:
        """Whether all remote models are ready that should be."""
        return await self._provider.ready()

    async def close(self) -> None:
        """Gives up what is in progress."""
        tasks = list(self._learning.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for model in self._models:
            await model.stop(0.0, 0.0)
        self._models.clear()


def _is_same(old: RemoteVersion, new: RemoteVersion) -> bool:
    return old.config == new.config and old.labels == new.labels

"""The remote models that this server has learned of, and how it learns of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from host.errors import ErrorCode, HostError, unavailable
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest
from host.models.registry import ModelEntry, ModelVersion, OnDemand, Registry, VersionState
from host.remote.provider import RemoteModelProvider, RemoteVersion
from host.remote.remote_model import RemoteModel
from host.remote.returning_calls import ReturningCalls

_log = logging.getLogger("pbhost")

_Started = TypeVar("_Started")
_Answer = TypeVar("_Answer")

_ANSWER_SECONDS = 15.0  # for statistics, the index and readiness


class RemoteModels:
    """Enters models of other servers into the registry when they are asked for.

    `timeout`: the most seconds to learn of one. `others`: loads models of this server on demand.
    Belongs to the event loop.
    """

    def __init__(self, provider: RemoteModelProvider, registry: Registry, timeout: float) -> None:
        self._provider = provider
        self._registry = registry
        self._timeout = timeout
        self.returning = ReturningCalls()
        """Which calls of other servers were made for calls to these models."""
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
        """As `learn`, by a question that is asked after this call, if the model is remote."""
        if self.serves(name):
            await self._learn_anew(name)

    async def refresh_known(self, name: str) -> None:
        """As `refresh`, if this server has learned of the model before."""
        if self._registry.is_remote(name):
            await self._learn_anew(name)

    async def _learn_anew(self, name: str) -> None:
        running = self._learning.get(name)
        if running is not None:
            # Its answer may be older than what the caller wants to know.
            await asyncio.wait([running])
        await self.learn(name)

    async def learn(self, name: str) -> bool:
        """Asks for the versions of a model; returns whether they have changed. Raises HostError.

        Callers that ask at the same time share one answer.
        """
        before = self._registry.versions(name)
        task = self._learning.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._learn(name))
            self._learning[name] = task
            task.add_done_callback(lambda _: self._learning.pop(name, None))
        await asyncio.wait([task])  # it has a deadline of its own
        if task.cancelled():
            raise unavailable("Server exiting")
        task.result()
        after = self._registry.versions(name)
        return {n: v.model for n, v in before.items()} != {n: v.model for n, v in after.items()}

    async def _learn(self, name: str) -> None:
        described = await _within(
            self._timeout,
            self._provider.describe(name),
            f"the server of model '{name}' did not describe it",
        )
        known = self._registry.versions(name)
        entry = ModelEntry(reason="" if described else "no version is loaded")
        for one in described:
            old = known[one.version].model if one.version in known else None
            if isinstance(old, RemoteModel) and _is_same(old.described, one):
                old.described = one
                model = old
            else:
                model = RemoteModel(one, self._provider, self._why_not_ready, self.returning)
            entry.versions[one.version] = ModelVersion(one.version, VersionState.READY, model=model)
            self._models.add(model)
        served = {number: version.model for number, version in entry.versions.items()}
        if served != {n: v.model for n, v in known.items()} or not self._registry.is_remote(name):
            # All frontend processes read the table of models again.
            self._registry.set_remote(name, entry)
        self._models = {
            model
            for model in self._models
            if model.name != name or model in served.values() or model.in_use
        }

    async def _why_not_ready(self, name: str, version: int) -> str:
        """Asks again. Raises HostError."""
        await self.learn(name)
        found = self._registry.versions(name).get(version)
        if found is None or not isinstance(found.model, RemoteModel):
            return "its server has unloaded it"
        return found.model.described.reason

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """The statistics of a remote model. Raises HostError."""
        what = f"model '{name}'" if name else "the remote models"
        return await _within(
            _ANSWER_SECONDS,
            self._provider.statistics(name, version),
            f"did not receive the statistics of {what}",
        )

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The index entries of all remote models. Raises HostError."""
        return await _within(
            _ANSWER_SECONDS,
            self._provider.index(ready),
            "did not receive the index entries of the remote models",
        )

    async def ready(self) -> bool:
        """Whether all remote models are ready that should be; False without an answer in time."""
        answered = self._provider.ready()
        try:
            return await _within(
                _ANSWER_SECONDS, answered, "did not receive the readiness of the remote models"
            )
        except _NoAnswerError as error:
            _log.warning("%s", error.message)
            return False

    async def drain(self, seconds: float) -> bool:
        """Refuses new calls and lets those in progress end; returns whether they did in time."""
        drains = [asyncio.ensure_future(model.drain()) for model in self._models]
        if not drains:
            return True
        _, left = await asyncio.wait(drains, timeout=max(0.0, seconds))
        for drain in left:
            drain.cancel()
        return not any(model.in_use for model in self._models)

    async def close(self) -> None:
        """Gives up what is in progress."""
        for task in self._learning.values():
            task.cancel()
        await asyncio.gather(*(model.stop(0.0, 0.0) for model in self._models))
        self._models.clear()


class _NoAnswerError(HostError):
    """The other server did not answer in time."""


async def _within(seconds: float, asked: Coroutine[Any, Any, _Answer], otherwise: str) -> _Answer:
    """The answer of the provider. Raises what the provider raises, and _NoAnswerError."""
    task = asyncio.ensure_future(asked)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise _NoAnswerError(ErrorCode.UNAVAILABLE, f"{otherwise} within {seconds:g} s")
    finally:
        task.cancel()  # its end is not awaited, as the provider may ignore this
    if task.cancelled():
        raise _NoAnswerError(ErrorCode.UNAVAILABLE, f"{otherwise}: the provider was cancelled")
    return task.result()


def _is_same(old: RemoteVersion, new: RemoteVersion) -> bool:
    return old.config == new.config and old.labels == new.labels

"""The loads and unloads that clients asked for, as all replicas carry them out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from host.errors import ErrorCode, HostError, unavailable
from host.model_control.hook import LoadParameters
from host.server.server import Server

_log = logging.getLogger("pbhost")

_QUESTION_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A load or an unload of a model.

    `stamp`: orders the changes of all replicas; it is the time in nanoseconds since 1970, and the
    replica that was asked. `parameters`: of a load, None for an unload.
    """

    name: str
    stamp: tuple[int, str]
    parameters: LoadParameters | None = None
    unload_dependents: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """How a replica could not carry out a change; errors of Ray have no codes."""

    replica: str
    code: str
    message: str

    def to_error(self) -> HostError:
        """The error for the client."""
        return HostError(ErrorCode(self.code), f"replica {self.replica}: {self.message}")


class ReplicaCalls(Protocol):
    """Calls the replicas of a deployment, see `host.ray.peers.Peers`."""

    own_id: str

    async def call(self, method: str, *arguments: object, timeout: float) -> list[object]:
        """The results of a method."""


@dataclass
class SharedModelControl:
    """Carries out changes here and at the other replicas; a `ModelControlHook` of a server.

    The last change of each model is kept, for replicas that start later. A change is made here
    first, so one that cannot be made is refused before others hear of it. `load_seconds`: how long
    another replica may take for a load.
    """

    peers: ReplicaCalls
    load_seconds: float
    changes: dict[str, ModelChange] = field(default_factory=dict)
    server: Server | None = None
    """The server, once it has loaded the models of its start."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Loads or reloads a model in every replica. Raises HostError."""
        await load_here()
        await self._pass_on(ModelChange(name, self._stamp(), dict(parameters)))

    async def unload(
        self, name: str, unload_dependents: bool, unload_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Unloads a model in every replica. Raises HostError."""
        await unload_here()
        await self._pass_on(ModelChange(name, self._stamp(), None, unload_dependents))

    def _stamp(self) -> tuple[int, str]:
        return time.time_ns(), self.peers.own_id

    async def _pass_on(self, change: ModelChange) -> None:
        if self.server is None:
            return  # a model that loads others as it starts; it does so in every replica
        self.changes[change.name] = change
        try:
            failures = await self.peers.call("apply_changes", [change], timeout=self.load_seconds)
        except TimeoutError:
            raise unavailable(
                f"model '{change.name}' has changed in this replica, but not within"
                f" {self.load_seconds:g} s in all others; they go on trying"
            ) from None
        for failure in failures:
            if isinstance(failure, Failure):
                raise failure.to_error()

    def record(self, name: str, loaded: bool) -> None:
        """Notes a change that every replica makes by itself, if clients had changed the model."""
        if name in self.changes:
            self.changes[name] = ModelChange(name, self._stamp(), {} if loaded else None)

    async def apply(self, changes: Iterable[ModelChange]) -> Failure | None:
        """Makes changes here that are newer than what is known. Returns the first failure."""
        server, failed = self.server, None
        if server is None:
            return None  # it asks for them when it has started
        async with self._turn:
            for change in changes:
                known = self.changes.get(change.name)
                if known is not None and known.stamp >= change.stamp:
                    continue
                self.changes[change.name] = change
                try:
                    if change.parameters is None:
                        await server.unload_model(change.name, change.unload_dependents)
                    else:
                        await server.load_model(change.name, change.parameters)
                except HostError as error:
                    _log.error("a change of model '%s' failed: %s", change.name, error.message)
                    failed = failed or Failure(self.peers.own_id, error.code.value, error.message)
        return failed

    async def catch_up(self) -> int:
        """Makes the changes that this replica has missed; returns how many replicas there are.

        Raises nothing: others may be busy; 0 is returned then.
        """
        try:
            known = await self.peers.call("list_changes", timeout=_QUESTION_SECONDS)
        except TimeoutError:
            _log.warning("other replicas did not tell their loads and unloads in time")
            return 0
        for changes in known:
            assert isinstance(changes, list)
            await self.apply(changes)
        return len(known)

"""The loads and unloads that clients asked for, as all replicas carry them out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from host.errors import ErrorCode, HostError, unavailable
from host.model_control.control import LoadParameters
from host.ray.channel_messages import ReplicaMethod
from host.server.server import Server

_log = logging.getLogger("pbhost")

_Result = TypeVar("_Result")

_QUESTION_SECONDS = 10.0

ReplicaStamps = tuple[str, dict[str, tuple[int, str]]]
"""A replica, and the stamp of the last change of each model that it knows."""


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A load or an unload of a model.

    `stamp`: orders the changes of all replicas; it is the time in nanoseconds since 1970, or a
    later one where newer changes are known, and the replica that was asked. `parameters`: the
    LoadParameters of a load, None for an unload.
    """

    name: str
    stamp: tuple[int, str]
    parameters: Mapping[str, Any] | None = None
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


APPLY_CHANGES = ReplicaMethod[Failure | None](
    "apply_changes", tuple[list[ModelChange]], Failure | None
)
LIST_STAMPS = ReplicaMethod[ReplicaStamps]("list_stamps", tuple[()], ReplicaStamps)
SEND_CHANGES = ReplicaMethod[list[ModelChange]](
    "send_changes", tuple[dict[str, str]], list[ModelChange]
)


class ReplicaCalls(Protocol):
    """Calls the replicas of a deployment, see `host.ray.replica.Peers`."""

    own_id: str

    async def call(
        self, method: ReplicaMethod[_Result], *arguments: object, timeout: float
    ) -> list[_Result]:
        """The results of a method. Raises HostError UNAVAILABLE."""


@dataclass
class SharedModelControl:
    """Carries out changes here and at the other replicas; a `ModelControlHook` of a server.

    The last change of each model is kept, for replicas that start later or have missed it. A change
    is made here first, so one that cannot be made is refused before others know of it; its stamp is
    taken before, so that of two changes at once the same one is the last in all replicas.
    `load_seconds`: how long another replica may take for a load.
    """

    peers: ReplicaCalls
    load_seconds: float
    changes: dict[str, ModelChange] = field(default_factory=dict)
    server: Server | None = None
    """The server, once it has loaded the models of its start."""
    _clock: int = 0
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _catching_up: asyncio.Task[None] | None = None
    _passing_on: set[asyncio.Task[None]] = field(default_factory=set)

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Loads or reloads a model in every replica. Raises HostError."""
        async with self.turn(name):
            stamp = self._stamp()
            await load_here()
            change = self._record_load(name, stamp, parameters)
        await self._pass_on(change)

    async def unload(
        self, name: str, unload_dependents: bool, unload_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Unloads a model in every replica. Raises HostError."""
        # Without a turn: a model may unload one whose load is in progress.
        change = ModelChange(name, self._stamp(), None, unload_dependents)
        await unload_here()
        self._record(change)
        if self.turn(name).locked():
            # It unloads itself in `initialize`. Others that do the same would wait for each other.
            task = asyncio.get_running_loop().create_task(self._pass_on(change))
            self._passing_on.add(task)
            task.add_done_callback(self._passing_on.discard)
            task.add_done_callback(_log_failure)
            return
        await self._pass_on(change)

    def turn(self, name: str) -> asyncio.Lock:
        """For the loads of one model. A load may make its model change others."""
        return self._turns.setdefault(name, asyncio.Lock())

    def _stamp(self) -> tuple[int, str]:
        """Newer than all known stamps, also if the clock of another machine is ahead."""
        self._clock = max(time.time_ns(), self._clock + 1)
        return self._clock, self.peers.own_id

    def _record_load(
        self, name: str, stamp: tuple[int, str], parameters: LoadParameters
    ) -> ModelChange:
        """Notes a load that was made here, with the configuration that is in force after it."""
        kept = dict(parameters)
        if self.server is not None and "config" not in kept:
            config = self.server.override_config(name)  # of an earlier load
            if config:
                kept["config"] = config
        change = ModelChange(name, stamp, kept)
        self._record(change)
        return change

    def _record(self, change: ModelChange) -> None:
        if self.server is not None and self._is_news(change.name, change.stamp):
            self.changes[change.name] = change

    def _is_news(self, name: str, stamp: tuple[int, str]) -> bool:
        self._clock = max(self._clock, stamp[0])
        known = self.changes.get(name)
        return known is None or known.stamp < stamp

    async def _pass_on(self, change: ModelChange) -> None:
        if self.server is None:
            return  # a model that changes others as it starts; it does so in every replica
        try:
            failures = await self.peers.call(APPLY_CHANGES, [change], timeout=self.load_seconds)
        except HostError as error:
            raise unavailable(
                f"model '{change.name}' has changed in this replica, but perhaps not in all others:"
                f" {error.message}; one that was not reached makes the change after its next health"
                " check"
            ) from error
        for failure in failures:
            if failure is not None:
                raise failure.to_error()

    def record(self, name: str, loaded: bool) -> None:
        """Notes a change that every replica makes by itself, if clients had changed the model."""
        if name not in self.changes:
            return
        if loaded:
            self._record_load(name, self._stamp(), {})
        else:
            self._record(ModelChange(name, self._stamp()))

    async def apply(self, changes: Iterable[ModelChange]) -> Failure | None:
        """Makes changes here that are newer than what is known. Returns the first failure.

        A change that fails is not made again: another load or unload has to ask for it.
        """
        if self.server is None:
            return None  # it asks for them when it has started
        failed = None
        for change in changes:
            if not self._is_news(change.name, change.stamp):
                continue
            async with self.turn(change.name):
                if self._is_news(change.name, change.stamp):
                    failed = await self._make(self.server, change) or failed
        return failed

    async def _make(self, server: Server, change: ModelChange) -> Failure | None:
        self.changes[change.name] = change
        try:
            if change.parameters is None:
                await server.unload_model(change.name, change.unload_dependents)
            else:
                await server.load_model(change.name, change.parameters)
        except HostError as error:
            _log.error("a change of model '%s' failed: %s", change.name, error.message)
            return Failure(self.peers.own_id, error.code.value, error.message)
        return None

    def list_stamps(self) -> ReplicaStamps:
        """The stamps of the changes that are known here."""
        return self.peers.own_id, {name: one.stamp for name, one in self.changes.items()}

    def select_changes(self, wanted: Mapping[str, str]) -> list[ModelChange]:
        """The changes of those models that this replica is asked for; `wanted`: ids by model."""
        return [
            self.changes[name]
            for name, replica in wanted.items()
            if replica == self.peers.own_id and name in self.changes
        ]

    async def catch_up(self) -> None:
        """Makes the changes that this replica has missed. Raises nothing if others are busy."""
        _, missed = await self._find_missed()
        await self._make_missed(missed)

    async def start_to_catch_up(self) -> int:
        """As `catch_up`, but makes the changes in the background, which may take long.

        Returns how many replicas there are, 0 if others are busy.
        """
        count, missed = await self._find_missed()
        if missed and (self._catching_up is None or self._catching_up.done()):
            task = asyncio.get_running_loop().create_task(self._make_missed(missed))
            task.add_done_callback(_log_failure)
            self._catching_up = task
        return count

    async def stop(self) -> None:
        """Ends what runs in the background."""
        tasks = {*self._passing_on, *([self._catching_up] if self._catching_up else ())}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _find_missed(self) -> tuple[int, dict[str, str]]:
        """The number of replicas; and the models with news, each with the replica that knows."""
        try:
            known = await self.peers.call(LIST_STAMPS, timeout=_QUESTION_SECONDS)
        except HostError as error:
            _log.warning("cannot find out what other replicas have loaded: %s", error.message)
            return 0, {}
        latest: dict[str, tuple[tuple[int, str], str]] = {}
        for replica, stamps in known:
            for name, stamp in stamps.items():
                if self._is_news(name, stamp) and (name not in latest or latest[name][0] < stamp):
                    latest[name] = stamp, replica
        return len(known), {name: replica for name, (_, replica) in latest.items()}

    async def _make_missed(self, missed: Mapping[str, str]) -> None:
        if not missed:
            return
        try:
            parts = await self.peers.call(SEND_CHANGES, missed, timeout=self.load_seconds)
        except HostError as error:
            _log.warning("did not receive model changes from other replicas: %s", error.message)
            return
        for changes in parts:
            await self.apply(changes)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a load or an unload did not reach all replicas", exc_info=error)

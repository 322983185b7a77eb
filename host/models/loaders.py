"""Loading of models: the interface of loaders, and the limit on loads at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from host.config.model_config import ConfigSettings, LoadedConfig
from host.config.parameters import CANARY_PARAMETER, SHADOW_PARAMETER
from host.config.schema import ModelConfig, is_ensemble
from host.errors import ErrorCode, HostError
from host.models.registry import LoadedModel
from host.repository.fingerprint import Fingerprint


class LendableSemaphore:
    """`async with` holds one of `count` slots; 0 means no limit. Belongs to the event loop."""

    def __init__(self, count: int) -> None:
        self._free = count or 1 << 30
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        while self._free <= 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            finally:
                self._queue.remove(turn)
        self._free -= 1

    async def __aexit__(self, *_: object) -> None:
        self._release_slot()

    @contextmanager
    def lend(self) -> Iterator[None]:
        """While entered, a holder's slot is free for others. It is taken back without a wait.

        So for a moment one holder more may continue, as its work has begun already.
        """
        self._release_slot()
        try:
            yield
        finally:
            self._free -= 1

    def _release_slot(self) -> None:
        self._free += 1
        for turn in self._queue:  # all of them, as one that is woken may have been cancelled
            if not turn.done():
                turn.set_result(None)


UPDATABLE_FIELDS = ("instance_group", "version_policy")
"""Fields of a configuration that may change while the loaded versions of the model stay.

Source: docs/reference/model-control.md, "Change detection".
"""

UPDATABLE_PARAMETERS = (CANARY_PARAMETER, SHADOW_PARAMETER)
"""Config parameters for which the same is true."""


def clear_updatable(config: ModelConfig) -> None:
    """Removes what may change while the loaded versions of the model stay."""
    for name in UPDATABLE_FIELDS:
        config.ClearField(name)
    for name in UPDATABLE_PARAMETERS:
        config.parameters.pop(name, None)


def copy_updatable(wanted: ModelConfig, config: ModelConfig) -> None:
    """Replaces in `config` what may change meanwhile by what `wanted` has."""
    clear_updatable(config)
    for name in UPDATABLE_FIELDS:
        getattr(config, name).MergeFrom(getattr(wanted, name))
    for name in UPDATABLE_PARAMETERS:
        if name in wanted.parameters:
            config.parameters[name].CopyFrom(wanted.parameters[name])


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How models are loaded and unloaded.

    Attributes:
        config: How their configurations are read.
        threads: Number of model versions that load at the same time.
        retries: Number of further attempts after a version failed to load.
        step: Seconds that a step of a load may take; 0 means no limit.
        grace: Seconds that a batch may still run when its model is unloaded.
        finalize: Seconds that a model's `finalize` may take.
        agents: Directory of repository agents.
        on_demand: Whether models without the parameter LOAD_ON_DEMAND load on demand.
    """

    config: ConfigSettings
    threads: int
    retries: int
    grace: float
    finalize: float
    step: float = 0.0
    agents: str = ""
    on_demand: bool = False


class RepositoryReadError(HostError):
    """The model's directory or its configuration cannot be read, so that no load was attempted."""


class VersionLoadError(HostError):
    """Versions of a model failed to load; `lines` name each of them, for the log."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)
        self.lines = lines


class InstanceUpdate(Protocol):
    """New instances for a version that stays loaded."""

    def commit(self) -> Collection[asyncio.Task[None]]:
        """Starts the new instances; surplus instances stop once they have finished their work.

        Returns the tasks that stop the busy ones without sequences.
        """

    async def wait_ended(self) -> None:
        """After `commit`: waits until the surplus instances that were idle have ended."""

    async def discard(self) -> None:
        """Stops the new instances and leaves the version as it was."""


class LoadAdmission(Protocol):
    """Makes loads wait until there is memory for them."""

    def admit(
        self, name: str, config: ModelConfig, files: Fingerprint | None, versions: int
    ) -> AbstractAsyncContextManager[Callable[[], Awaitable[None]]]:
        """Waits for room for a load, which runs inside of this context. Raises HostError.

        `files`: the state of the model's files. `versions`: how many versions are loaded, 0 if only
        their instances change. Returns what the load calls when its instances are made; that raises
        HostError if the model does not fit after all.
        """


class ModelLoader(Protocol):
    """Loads versions of models."""

    async def load_version(
        self, directory: Path, version: int, loaded: LoadedConfig
    ) -> LoadedModel:
        """Returns a model that can be asked. Raises HostError."""

    async def update(
        self, model: LoadedModel, loaded: LoadedConfig, finalize: float
    ) -> InstanceUpdate | None:
        """Prepares the instances that `loaded` asks for; None if the model must be loaded again.

        `finalize`: seconds for `finalize` of surplus instances. Raises HostError.
        """


class LoadHook(Protocol):
    """What a frontend adds to the load of every version."""

    def before_load(self, loaded: LoadedConfig) -> None:
        """Checks the configuration before anything is started. Raises HostError."""

    async def after_load(self, model: LoadedModel, directory: Path, loaded: LoadedConfig) -> None:
        """Adds what the frontend keeps with the model. If it raises HostError, the load fails."""


@dataclass(frozen=True, slots=True)
class Loaders:
    """What loads models: a loader for each kind, and the hooks of all loads.

    Attributes:
        instances: Loads models that run in instances.
        ensembles: Loads ensembles.
        hooks: Called for each version, in this order.
    """

    instances: ModelLoader
    ensembles: ModelLoader
    hooks: Sequence[LoadHook] = ()

    def find_loader(self, config: ModelConfig) -> ModelLoader:
        """The loader of the kind that a model is of."""
        return self.ensembles if is_ensemble(config) else self.instances

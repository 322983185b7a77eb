"""What a load is asked for, who does it, and how it fails."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from host.config import model_config as configuration
from host.config.model_config import ModelConfig
from host.errors import ErrorCode, HostError
from host.models.registry import LoadedModel
from host.models.updating import InstanceUpdate
from host.repository.override import Override


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How models are loaded and unloaded.

    `strict`: configurations must be complete. `config_name`: of the file in `configs/` that comes
    before `config.pbtxt`. `threads`: how many versions load at a time.
    `retries`: how often a version is tried again. `grace` and `finalize`: seconds for a stuck
    batch and for `finalize` at unload. `gpus`: those that instances may run on, of at least that
    compute capability. `agents`: where repository agents would be.
    """

    strict: bool
    threads: int
    retries: int
    grace: float
    finalize: float
    gpus: Sequence[int] = ()
    least_capability: float = 6.0
    config_name: str | None = None
    agents: str = ""


class RepositoryReadError(HostError):
    """A load could not even begin: the model's directory or its configuration is no good."""


class VersionLoadError(HostError):
    """Versions of a model could not be brought up; `lines` say which, for the log."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)
        self.lines = lines


class FailureLog:
    """What the log is told of failed loads. What polls meet again is no news."""

    def __init__(self) -> None:
        self._met: dict[str, set[str]] = {}  # by polls since a load that did not fail

    def lines_for(self, name: str, error: HostError, polled: bool) -> list[tuple[int, str]]:
        """The lines for a failed load of that model, with their levels."""
        lines = [f"failed to load '{name}': {error.status_string}"]
        if isinstance(error, VersionLoadError):
            lines = error.lines
        met = self._met.setdefault(name, set()) if polled else set()
        levels = [logging.DEBUG if line in met else logging.ERROR for line in lines]
        met.update(lines)
        return list(zip(levels, lines, strict=True))

    def clear(self, name: str) -> None:
        """Whatever comes next is news."""
        self._met.pop(name, None)


PrepareCallback = Callable[[ModelConfig], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One load, as `Lifecycle.load` was asked for it; `unloads` the model had seen by then."""

    name: str
    override: Override | None
    polled: bool
    force: bool
    prepare: PrepareCallback | None
    unloads: int


class ModelLoader(Protocol):
    """Whoever brings a version up."""

    async def load(
        self, directory: Path, version: int, loaded: configuration.LoadedConfig
    ) -> LoadedModel:
        """A model that can be asked. Raises HostError."""

    async def update(
        self, model: LoadedModel, loaded: configuration.LoadedConfig, finalize: float
    ) -> InstanceUpdate | None:
        """What gives it the instances of that configuration; None if it must be loaded anew.

        `finalize`: seconds for those that are too many. Raises HostError.
        """

"""Versions that serve and need not be loaded anew (configuration spec 3.1 and 8.4)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from host.config.model_config import ModelConfig
from host.models.registry import LoadedModel
from host.repository.override import Override
from host.repository.repository import Fingerprint

UPDATABLE_FIELDS = ("instance_group", "version_policy")
"""What of a configuration may be another one without its model being loaded anew."""


class InstanceUpdate(Protocol):
    """A version that goes on serving, with other instances once it is committed."""

    def commit(self) -> None:
        """Let new instances take work, and those that are too many finish theirs."""

    async def discard(self) -> None:
        """Leave everything as it was."""


@dataclass(frozen=True, slots=True)
class UpdatedInPlace:
    """The outcome of a load that has not made a model."""

    update: InstanceUpdate


@dataclass(frozen=True, slots=True)
class FileState:
    """What a model's files looked like when it was loaded; `config` is its configuration file."""

    path: Path
    fingerprint: Fingerprint
    config: Path

    def of_version(self, version: int) -> Fingerprint:
        """What that version is made of: its folder, and all that belongs to no other one."""
        config = self.config.relative_to(self.path).parts[0]
        return frozenset(
            entry
            for entry in self.fingerprint
            for top in (os.path.relpath(entry[0], self.path).split(os.sep)[0],)
            if top == str(version) or not (top.isdecimal() or top == config)
        )


class LoadedFrom:
    """What models were loaded from: the repository as it looked, and a configuration of a client's.

    That one holds for as long as the files look the same (configuration spec 8.6).
    """

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Fingerprint, Override | None]] = {}

    def record(self, name: str, look: FileState | None, override: Override | None) -> None:
        """A model is loaded; `look` is None if all its files have come from a client."""
        self.forget(name)
        if look is not None:
            self._sources[name] = look.fingerprint, override

    def forget(self, name: str) -> None:
        """The model is unloaded."""
        self._sources.pop(name, None)

    def is_current(self, name: str, seen: Fingerprint) -> bool:
        """Whether the model was loaded from a repository that looked like this."""
        return name in self._sources and self._sources[name][0] == seen

    def override(self, name: str) -> Override | None:
        """What a client has configured."""
        return self._sources[name][1]


class LoadedConfigs:
    """What each living model was read as."""

    def __init__(self) -> None:
        self._records: dict[LoadedModel, tuple[bytes, FileState | None]] = {}

    def record(self, model: LoadedModel, config: ModelConfig, look: FileState | None) -> None:
        """A model serves by this configuration, as it was before the model completed it."""
        self._records[model] = _without_updatable_fields(config), look

    def forget(self, model: LoadedModel) -> None:
        """The model has ended."""
        self._records.pop(model, None)

    def can_update_in_place(
        self, model: LoadedModel, config: ModelConfig, look: FileState | None
    ) -> bool:
        """Whether only instances and the choice of versions are other than they were."""
        essence, before = self._records.get(model, (b"", None))
        if before is None or look is None or essence != _without_updatable_fields(config):
            return False
        return before.of_version(model.version) == look.of_version(model.version)


def _without_updatable_fields(config: ModelConfig) -> bytes:
    rest = type(config)()
    rest.CopyFrom(config)
    for name in UPDATABLE_FIELDS:
        rest.ClearField(name)
    essence: bytes = rest.SerializeToString(deterministic=True)
    return essence

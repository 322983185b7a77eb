"""Records of what models and their versions were loaded from."""

from __future__ import annotations

from dataclasses import dataclass

from host.config.schema import ModelConfig
from host.models.loaders import clear_updatable
from host.models.registry import LoadedModel
from host.repository.fingerprint import Fingerprint
from host.repository.override import ModelFiles, Override


@dataclass(frozen=True, slots=True)
class FileState:
    """The files of a model directory at one moment.

    Attributes:
        root: The model directory, or its URL in an object store.
        fingerprint: Path, size and modification time of each file below it.
        config: The configuration file, or the folder with it; it need not exist.
    """

    root: str
    fingerprint: Fingerprint
    config: str

    def of_version(self, version: int) -> Fingerprint:
        """The part that concerns one version: its folder, and files that all versions share."""
        return frozenset(
            entry
            for entry in self.fingerprint
            for top in (self._part(entry[0]),)
            if top == str(version) or not (top.isdecimal() or top == self.config)
        )

    def changed_parts(self, other: FileState) -> set[str]:
        """The files and folders in the model directory that differ in another state of it."""
        return {self._part(entry[0]) for entry in self.fingerprint ^ other.fingerprint}

    def _part(self, path: str) -> str:
        return path.removeprefix(f"{self.root}/").split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """What a living version was loaded from.

    Attributes:
        files: Its directory; an uploaded one is removed with its last user.
        state: The state of the repository's files; None if a client uploaded all of them.
        config: The configuration without the fields that can be updated in place, serialised.
    """

    files: ModelFiles
    state: FileState | None
    config: bytes

    def can_update_in_place(
        self, version: int, config: ModelConfig, state: FileState | None
    ) -> bool:
        """Whether only what may change in place, or other versions, has changed since the load."""
        if self.state is None or state is None or self.config != serialize_fixed_fields(config):
            return False
        return self.state.of_version(version) == state.of_version(version)


@dataclass(slots=True)
class ModelRecord:
    """What a model was loaded from by its last load that succeeded.

    Attributes:
        fingerprint: The files in the repository; None if the model is not loaded from there.
        override: The configuration that a client sent with a load. It holds for loads without one
            until the files change (docs/reference/model-control.md, "Load
            requests").
        override_outlasts_changes: Whether that load was the last one that a client asked for.
            Then the override also holds, after a change of files, for loads that only happen
            because of an ensemble.
        loads: Number of loads that have succeeded. What was read before the last one is outdated.
        unloads: Number of unloads so far. A load is given up if it changes meanwhile.
    """

    fingerprint: Fingerprint | None = None
    override: Override | None = None
    override_outlasts_changes: bool = False
    loads: int = 0
    unloads: int = 0


class LoadRecords:
    """One record for each model by name, and one for each version that is alive."""

    def __init__(self) -> None:
        self._models: dict[str, ModelRecord] = {}
        self._versions: dict[LoadedModel, VersionRecord] = {}

    def find(self, name: str) -> ModelRecord:
        """The record of a model; an empty one that is not kept if there is none."""
        return self._models.get(name) or ModelRecord()

    def create(self, name: str) -> ModelRecord:
        """The record of a model, which is made if there is none."""
        return self._models.setdefault(name, ModelRecord())

    def is_current(self, name: str, fingerprint: Fingerprint) -> bool:
        """Whether the model was loaded from a directory with this fingerprint."""
        record = self._models.get(name)
        return record is not None and record.fingerprint == fingerprint

    def add_version(
        self, model: LoadedModel, files: ModelFiles, state: FileState | None, config: ModelConfig
    ) -> None:
        """Records a version that was loaded, and takes a reference to its files."""
        files.acquire()
        self._versions[model] = VersionRecord(files, state, serialize_fixed_fields(config))

    def update_version(
        self, model: LoadedModel, state: FileState | None, config: ModelConfig
    ) -> None:
        """Records a version that was updated in place."""
        files = self._versions[model].files
        self._versions[model] = VersionRecord(files, state, serialize_fixed_fields(config))

    def version(self, model: LoadedModel) -> VersionRecord:
        """The record of a version that is alive."""
        return self._versions[model]

    def remove_version(self, model: LoadedModel) -> ModelFiles:
        """Forgets a version that has stopped; the caller releases the files."""
        return self._versions.pop(model).files

    def living_models(self) -> list[LoadedModel]:
        """Every version that is alive, including those that only finish their work."""
        return list(self._versions)


def serialize_fixed_fields(config: ModelConfig) -> bytes:
    """The configuration without what may change in place, as comparable bytes."""
    fixed = type(config)()
    fixed.CopyFrom(config)
    clear_updatable(fixed)
    serialized: bytes = fixed.SerializeToString(deterministic=True)
    return serialized

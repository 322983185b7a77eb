"""Plans the loads of models, and records of what has been loaded.

A plan is made from what lies in the repositories or was uploaded, before anything is started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from host.config.findings import raise_first
from host.config.model_config import LoadedConfig, config_file, load_config, read_unchecked_config
from host.config.parameters import check_load_parameters, loads_on_demand
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError
from host.models.loaders import LoadSettings, RepositoryReadError, VersionLoadError, clear_updatable
from host.models.registry import LoadedModel, ModelVersion, Registry, VersionState
from host.remote_models import RemoteModels
from host.repository.fingerprint import Fingerprint, FingerprintFunction
from host.repository.model_directory import (
    list_served_versions,
    model_file_path,
    run_agents,
    select_versions,
)
from host.repository.object_store.listed_model import ListedModel
from host.repository.override import ModelFiles, Override, UploadedDirectories
from host.repository.repository import Repository


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


class LoadFailureLog:
    """Chooses the level of each line about a failed load.

    A failure that a poll meets again is logged at debug level, as it was reported before.
    """

    def __init__(self) -> None:
        self._reported: dict[str, set[str]] = {}  # lines by model, since its last good load

    def lines_for(self, name: str, error: HostError, polled: bool) -> list[tuple[int, str]]:
        """Returns (level, line) pairs for a failed load of a model."""
        lines = [f"failed to load '{name}': {error.status_string}"]
        if isinstance(error, VersionLoadError):
            lines = error.lines
        reported = self._reported.setdefault(name, set()) if polled else set()
        levels = [logging.DEBUG if line in reported else logging.ERROR for line in lines]
        reported.update(lines)
        return list(zip(levels, lines, strict=True))

    def clear(self, name: str) -> None:
        """Reports the next failure of this model at error level again."""
        self._reported.pop(name, None)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model of a load plan, as its files were when the plan was made.

    Attributes:
        name: The model.
        reason: Why it is in the plan: "" if the caller named it, else which model needs or uses it.
        requested: The override of this load, or the one that a load because of an ensemble keeps.
        files: The directory that versions are loaded from; None if it could not be found.
        state: The state of the repository's files; None if a client uploaded all of them.
        override: The override in force, from this load or from an earlier one.
        stored: The model in its object store; None if the contents are in the directory.
        loaded: The configuration; None if it was not read, as the model need not be loaded.
        available: The versions on disk that the model may serve.
        step_models: Of an ensemble, the qualified names of its step models by name.
        error: Why the model cannot be loaded.
        loads: The number of loads of the model before the plan was made.
        unloads: The number of its unloads until then.
    """

    name: str
    reason: str = ""
    requested: Override | None = None
    files: ModelFiles | None = None
    state: FileState | None = None
    override: Override | None = None
    stored: ListedModel | None = None
    loaded: LoadedConfig | None = None
    available: Sequence[int] = ()
    step_models: Mapping[str, str] = field(default_factory=dict)
    error: HostError | None = None
    loads: int = 0
    unloads: int = 0

    @property
    def keeps_override(self) -> bool:
        """Whether it has the override of an earlier load, and an ensemble is why it is loaded."""
        return bool(self.reason) and self.requested is not None

    @property
    def is_uploaded(self) -> bool:
        """Whether a client uploaded all files."""
        return self.files is not None and self.state is None

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        if self.error is not None:
            return f"{self.name}{why}: {self.error.message}"
        steps = ", ".join(sorted(self.step_models.values()))
        return f"{self.name}{why}" + (f" after {steps}" if steps else "")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The models that one request loads, in an order in which step models precede ensembles.

    An ensemble that contains itself follows those of its step models that do not lead to it.
    """

    models: Sequence[PlannedModel]

    def __str__(self) -> str:
        return "\n".join(f"{number}. {one}" for number, one in enumerate(self.models, 1))


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """What happens to the versions of one model.

    Attributes:
        name: The model.
        files: The directory that versions are loaded from.
        state: The state of the repository's files; None if a client uploaded all of them.
        loaded: The configuration of the model.
        override: The override in force, from this load or from an earlier one.
        chosen: The versions that the version policy selects.
        before: The versions that the registry knew.
        serving: Those of them that are ready; they serve until the plan is executed.
        in_place: Those of them that stay loaded and at most get other instances.
    """

    name: str
    files: ModelFiles
    state: FileState | None
    loaded: LoadedConfig
    override: Override | None
    chosen: list[int]
    before: Mapping[int, ModelVersion]
    serving: frozenset[int]
    in_place: Mapping[int, LoadedModel]


class LoadPlanner:
    """Plans loads from what lies in the repository or was uploaded; reads disks in threads.

    `records`: what the models were loaded from before. `remote`: the models of other servers.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        records: LoadRecords,
        settings: LoadSettings,
        uploads: UploadedDirectories,
        fingerprint: FingerprintFunction,
        remote: RemoteModels | None,
    ) -> None:
        self.remote = remote
        self._registry = registry
        self._repository = repository
        self._records = records
        self._settings = settings
        self._uploads = uploads
        self._fingerprint = fingerprint

    async def plan_load(
        self,
        names: Mapping[str, str],
        override: Override | None,
        step_models_of: Callable[[str], Collection[str]],
        known: Container[str],
        if_missing: bool,
    ) -> LoadPlan:
        """Plans the load of models and of the step models that they need.

        `names`: the models, and why each is loaded; "" if the caller named it. `override` is that
        of the models that the caller named. `step_models_of`: returns the step models that a model
        had when it was read last. Models in `known` belong to an earlier plan. `if_missing`: models
        that serve are left alone. A model that cannot be read is in the plan with its error.
        """
        found: dict[str, PlannedModel] = {}
        wanted = dict(names)
        while wanted:
            models = await asyncio.gather(
                *(
                    self.read(
                        name,
                        self.lasting_override(name) if reason else override,
                        reason,
                        with_config=bool(step_models_of(name)),
                        if_missing=if_missing,
                    )
                    for name, reason in wanted.items()
                )
            )
            found.update(zip(wanted, models, strict=True))
            wanted = {
                step: f"step of '{model.name}'"
                for model in models
                for step in sorted(set(model.step_models.values()))
                if step not in found and step not in known
            }
        return LoadPlan(_in_order(found))

    def lasting_override(self, name: str) -> Override | None:
        """The override that a load because of an ensemble has to keep, if there is one."""
        record = self._records.find(name)
        return record.override if record.override_outlasts_changes else None

    async def read(
        self,
        name: str,
        override: Override | None = None,
        reason: str = "",
        *,
        with_config: bool = False,
        if_missing: bool = False,
    ) -> PlannedModel:
        """Reads a model from the repository, or from what a client uploaded.

        Without `with_config`, the configuration of a model that serves these files is left out.
        `if_missing`: that of any model that serves is.
        """
        record = self._records.find(name)
        planned = PlannedModel(name, reason, override, loads=record.loads, unloads=record.unloads)
        if self.is_remote(name) or (if_missing and self.is_serving(name, polled=True)):
            return planned
        try:
            planned = await self._find_files(planned)
            if planned.override is None and planned.state is not None:
                if self._records.is_current(name, planned.state.fingerprint):
                    if not with_config and self.is_serving(name, polled=True):
                        return planned
                    kept = self._records.find(name).override
                    planned = dataclasses.replace(planned, override=kept)
            return await self._read_config(planned)
        except HostError as error:
            return dataclasses.replace(planned, error=error)

    def is_remote(self, name: str) -> bool:
        """Whether the model belongs to another server, which loads it."""
        return self.remote is not None and self.remote.serves(name)

    async def learn_remote(self, name: str) -> bool:
        """Asks for the versions of a model of another server; returns whether they have changed.

        Raises HostError.
        """
        assert self.remote is not None
        return await self.remote.learn(name)

    async def _find_files(self, planned: PlannedModel) -> PlannedModel:
        """Finds the directory to load from, and its state if it lies in the repository."""
        name, override = planned.name, planned.requested
        try:
            if override is not None and override.files:
                path = await asyncio.to_thread(self._uploads.write, override.files)
                files = ModelFiles(path, partial(self._uploads.remove, path))
                return dataclasses.replace(planned, files=files, override=override)
            await self._repository.refresh(name)
            found = await asyncio.to_thread(self._repository.find_model_directory, name)
            path, stored = found.path, found.stored
            fingerprint = await asyncio.to_thread(found.fingerprint, name, self._fingerprint)
            config = config_file(path, self._settings.config_name).relative_to(path).parts[0]
            root = str(path) if stored is None else stored.root
            state = FileState(root, fingerprint, config)
            return dataclasses.replace(
                planned, files=ModelFiles(path), state=state, override=override, stored=stored
            )
        except HostError as error:
            raise RepositoryReadError(error.code, error.message) from error

    async def _read_config(self, planned: PlannedModel) -> PlannedModel:
        """Reads the configuration, and finds the versions and the step models."""
        name, files, override = planned.name, planned.files, planned.override
        assert files is not None

        def read() -> PlannedModel:
            loaded = load_config(
                files.path,
                strict=self._settings.strict,
                config_name=self._settings.config_name,
                override=None if override is None else override.config,
                gpus=self._settings.gpus,
                least_capability=self._settings.least_capability,
                name=self._registry.name_of(name),
                cpu_fallback=self._settings.cpu_fallback,
                variables=self._settings.variables,
                adapt=self._settings.adapt_config,
            )
            loaded = dataclasses.replace(loaded, namespace=self._repository.namespace_of(name))
            if planned.stored is None:
                run_agents(loaded.config, files.path, self._settings.agents)
            available = list_served_versions(files.path, loaded.config)
            steps = {step.model_name for step in loaded.config.ensemble_scheduling.step}
            found = self._repository.resolve_step_models(name, steps)
            return dataclasses.replace(
                planned, loaded=loaded, available=available, step_models=found
            )

        try:
            return await asyncio.to_thread(read)
        except HostError as error:
            raise RepositoryReadError(error.code, error.message) from error
        except OSError as error:
            text = f"failed to read model '{name}': {error}"
            raise RepositoryReadError(ErrorCode.INTERNAL, text) from error

    def is_up_to_date(self, planned: PlannedModel, polled: bool, if_missing: bool) -> bool:
        """Whether the model serves what is planned, so that a load would change nothing."""
        name = planned.name
        if if_missing and self.is_serving(name, polled=True):
            return True
        return (
            planned.requested is None
            and planned.state is not None
            and self._records.is_current(name, planned.state.fingerprint)
            and self.is_serving(name, polled)
        )

    async def plan_versions(self, planned: PlannedModel, force: bool) -> VersionPlan:
        """Plans what happens to the versions of a model. Raises HostError.

        `force`: those that serve are replaced, even if nothing of them has changed.
        """
        name, files, loaded = planned.name, planned.files, planned.loaded
        assert files is not None and loaded is not None
        self._registry.clear_failed(name)
        try:
            chosen = select_versions(loaded.config, planned.available)
        except HostError as error:
            self._registry.set_no_versions(name, error.status_string)
            raise
        for number in chosen:
            await asyncio.to_thread(model_file_path, files.path, number, loaded.config)
        before = self._registry.versions(name)
        serving = frozenset(n for n, v in before.items() if v.state is VersionState.READY)
        state = planned.state
        in_place = {
            number: model
            for number in serving
            if not force and (model := before[number].model) is not None and model.ready
            if self._records.version(model).can_update_in_place(number, loaded.config, state)
        }
        return VersionPlan(
            name, files, state, loaded, planned.override, chosen, before, serving, in_place
        )

    async def fetch(self, planned: PlannedModel, plan: VersionPlan) -> VersionPlan:
        """The plan with a directory that has the contents of the files, and with its state.

        The caller releases it. Of a model in an object store, what the cache lacks is fetched.
        Raises HostError.
        """
        if planned.stored is None or plan.state is None:
            plan.files.acquire()
            return plan
        fetched, fingerprint = await self._repository.fetch(planned.stored, plan.chosen)
        files = ModelFiles(fetched.path, fetched.close)
        config, agents = plan.loaded.config, self._settings.agents
        try:
            await asyncio.to_thread(run_agents, config, files.path, agents)
        except BaseException:  # also if cancelled
            fetched.close()
            raise
        state = dataclasses.replace(plan.state, fingerprint=fingerprint)
        fresh = {str(number) for number in plan.chosen if number not in plan.in_place}
        if not plan.state.changed_parts(state) <= fresh:
            state = plan.state  # versions that stay, or that are not planned, need another load
        return dataclasses.replace(plan, files=files, state=state)

    def note_on_demand(self, planned: PlannedModel) -> None:
        """Enters into the registry whether the model loads on demand."""
        if planned.loaded is not None:
            if loads_on_demand(planned.loaded.config, self._settings.on_demand):
                self._registry.on_demand.add(planned.name)
            else:
                self._registry.on_demand.discard(planned.name)

    def is_serving(self, name: str, polled: bool) -> bool:
        """Whether the model can be asked; for the poller, whether it could be after its load."""
        return any(
            version.state is VersionState.READY
            and version.model is not None
            and (polled or version.model.ready)
            for version in self._registry.versions(name).values()
        )

    def find_models_on_demand(self) -> set[str]:
        """The models on disk that load on demand, by qualified name. Blocks.

        The parameters of a configuration that cannot be read do not count.
        """
        found: set[str] = set()
        by_default = self._settings.on_demand
        for name, directory in self._repository.scan().models.items():
            if directory.duplicated:
                continue
            try:
                if loads_on_demand(self.read_unchecked_config(name), by_default):
                    found.add(name)
            except HostError:
                if by_default:
                    found.add(name)
        return found

    def read_unchecked_config(self, name: str) -> ModelConfig:
        """The configuration file of a model, whose load parameters are valid. Blocks.

        Raises HostError if the model is not on disk, or if the file is not valid.
        """
        path = self._repository.find_model_directory(name).path
        settings = self._settings
        config = read_unchecked_config(path, settings.config_name, settings.variables)
        raise_first(check_load_parameters(config), None)
        return config


def _in_order(found: Mapping[str, PlannedModel]) -> list[PlannedModel]:
    """The models, each after its step models as far as these do not lead back to it."""
    ordered: dict[str, PlannedModel] = {}
    entered: set[str] = set()
    for name in found:
        _enter(name, found, entered, ordered)
    return list(ordered.values())


def _enter(
    name: str,
    found: Mapping[str, PlannedModel],
    entered: set[str],
    ordered: dict[str, PlannedModel],
) -> None:
    if name in entered or name not in found:
        return
    entered.add(name)
    for step in sorted(found[name].step_models.values()):
        _enter(step, found, entered, ordered)
    ordered[name] = found[name]

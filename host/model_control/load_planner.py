"""Plans loads: which models, which of their versions, and what happens to each version.

A plan is made from what lies in the repositories or was uploaded, before anything is started.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from host.config.findings import raise_first
from host.config.model_config import LoadedConfig, config_file, load_config, read_unchecked_config
from host.config.parameters import check_load_parameters, loads_on_demand
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError
from host.model_control.load_records import FileState, LoadRecords
from host.models.loaders import LoadSettings, RepositoryReadError
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
class LoadRequest:
    """How a load was asked for.

    Attributes:
        override: The configuration, and files, that a client sent with it.
        polled: Whether the poller asked. Then a failure that was logged before is not logged again,
            and a model whose instances were given up is left alone until its files change.
        if_missing: Whether a model that serves is left alone, even if its files have changed.
    """

    override: Override | None = None
    polled: bool = False
    if_missing: bool = False


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model of a load plan, as its files were when the plan was made.

    Attributes:
        name: The model.
        reason: Why it is in the plan: "" if the caller named it, else which model needs or uses it.
        request: The request; its override may be one that a load because of an ensemble keeps.
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
    request: LoadRequest = LoadRequest()
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
        return bool(self.reason) and self.request.override is not None

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
        request: LoadRequest,
        step_models_of: Callable[[str], Collection[str]],
        known: Container[str],
    ) -> list[PlannedModel]:
        """Plans the load of models and of the step models that they need.

        `names`: the models, and why each is loaded; "" if the caller named it. The override of
        `request` is for the models that the caller named. `step_models_of`: returns the step models
        that a model had when it was read last. Models in `known` belong to an earlier plan.

        Returns the models in an order in which step models precede ensembles; an ensemble that
        contains itself follows those of its step models that do not lead to it. A model that cannot
        be read is among them with its error.
        """
        found: dict[str, PlannedModel] = {}
        wanted = dict(names)

        async def plan(name: str, reason: str) -> PlannedModel:
            own = request
            if reason:
                own = dataclasses.replace(request, override=self.lasting_override(name))
            if request.if_missing and self.serves(name):
                return self._unread(name, own, reason)
            return await self.read(name, own, reason, with_config=bool(step_models_of(name)))

        while wanted:
            models = await asyncio.gather(*map(plan, wanted, wanted.values()))
            found.update(zip(wanted, models, strict=True))
            wanted = {
                step: f"step of '{model.name}'"
                for model in models
                for step in sorted(set(model.step_models.values()))
                if step not in found and step not in known
            }
        return _in_order(found)

    def lasting_override(self, name: str) -> Override | None:
        """The override that a load because of an ensemble has to keep, if there is one."""
        record = self._records.find(name)
        return record.override if record.override_outlasts_changes else None

    def _unread(self, name: str, request: LoadRequest, reason: str) -> PlannedModel:
        record = self._records.find(name)
        return PlannedModel(name, reason, request, loads=record.loads, unloads=record.unloads)

    async def read(
        self, name: str, request: LoadRequest, reason: str = "", *, with_config: bool = False
    ) -> PlannedModel:
        """Reads a model from the repository, or from what a client uploaded.

        Without `with_config`, the configuration of a model that serves these files is left out.
        """
        planned = self._unread(name, request, reason)
        if self.is_remote(name):
            return planned
        try:
            planned = await self._find_files(planned)
            if planned.override is None and planned.state is not None:
                if self._records.is_current(name, planned.state.fingerprint):
                    if not with_config and self.serves(name):
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
        name, override = planned.name, planned.request.override
        try:
            if override is not None and override.files:
                path = await asyncio.to_thread(self._uploads.write, override.files)
                files = ModelFiles(path, partial(self._uploads.remove, path))
                return dataclasses.replace(planned, files=files, override=override)
            await self._repository.refresh(name)
            found = await asyncio.to_thread(self._repository.find_model_directory, name)
            path, stored = found.path, found.stored
            fingerprint = await asyncio.to_thread(found.fingerprint, name, self._fingerprint)
            config = config_file(path, self._settings.config.config_name).relative_to(path).parts[0]
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
                self._settings.config,
                override=None if override is None else override.config,
                name=self._registry.name_of(name),
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

    def is_up_to_date(self, planned: PlannedModel) -> bool:
        """Whether the model serves what is planned, so that a load would change nothing."""
        name, request = planned.name, planned.request
        if request.if_missing and self.serves(name):
            return True
        return (
            request.override is None
            and planned.state is not None
            and self._records.is_current(name, planned.state.fingerprint)
            and self.serves(name, now=not request.polled)
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

    def serves(self, name: str, now: bool = False) -> bool:
        """Whether a version of the model is ready; `now`: and one of its instances is alive."""
        return any(
            version.state is VersionState.READY
            and version.model is not None
            and (version.model.ready or not now)
            for version in self._registry.versions(name).values()
        )

    def is_current(self, name: str, fingerprint: Fingerprint) -> bool:
        """Whether a model serves that was loaded from a directory with this fingerprint."""
        return self._records.is_current(name, fingerprint) and self.serves(name)

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
        settings = self._settings.config
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

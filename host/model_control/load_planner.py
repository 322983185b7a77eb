"""The first half of a load: reads files and configuration, and plans what is loaded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from host.config.findings import raise_first
from host.config.load_parameters import check_load_parameters, loads_on_demand
from host.config.model_config import (
    LoadedConfig,
    ModelConfig,
    config_file,
    load_config,
    read_unchecked_config,
)
from host.errors import ErrorCode, HostError
from host.model_control.load_records import FileState, LoadRecords
from host.models.loading import LoadSettings, RepositoryReadError
from host.models.registry import LoadedModel, ModelVersion, Registry, VersionState
from host.repository.agents import run_agents
from host.repository.override import ModelFiles, Override, UploadedDirectories
from host.repository.repository import (
    FingerprintFunction,
    Repository,
    list_served_versions,
    model_file_path,
    select_versions,
)

PrepareCallback = Callable[[ModelConfig], Awaitable[None]]
"""Called with the configuration before a load begins; may raise HostError to refuse it."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one `ModelLifecycle.load`; `unloads`: unloads of the model before it."""

    name: str
    override: Override | None
    polled: bool
    if_missing: bool
    force: bool
    prepare: PrepareCallback | None
    unloads: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load is going to do.

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

    `records`: what the models were loaded from before.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        records: LoadRecords,
        settings: LoadSettings,
        uploads: UploadedDirectories,
        fingerprint: FingerprintFunction,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._records = records
        self._settings = settings
        self._uploads = uploads
        self._fingerprint = fingerprint

    async def find_files(
        self, name: str, override: Override | None
    ) -> tuple[ModelFiles, FileState | None]:
        """The directory to load from, and its state if it lies in the repository."""
        try:
            if override is not None and override.files:
                path = await asyncio.to_thread(self._uploads.write, override.files)
                return ModelFiles(path, self._uploads), None
            path = (await asyncio.to_thread(self._repository.find_model_directory, name)).path
            fingerprint = await asyncio.to_thread(self._fingerprint, name, path)
            config = config_file(path, self._settings.config_name)
            return ModelFiles(path), FileState(path, fingerprint, config)
        except HostError as error:
            raise RepositoryReadError(error.code, error.message) from error

    async def plan(
        self, request: LoadRequest, files: ModelFiles, state: FileState | None
    ) -> LoadPlan | None:
        """Plans a load; None if the model is up to date. Raises HostError."""
        name, override = request.name, request.override
        if request.if_missing and not request.force and self.is_serving(name, polled=True):
            return None
        if override is None and state is not None:
            if self._records.is_current(name, state.fingerprint):
                if not request.force and self.is_serving(name, request.polled):
                    return None
                override = self._records.find(name).override
        loaded, available = await self._read_config(name, files, override)
        if loads_on_demand(loaded.config, self._settings.on_demand):
            self._registry.on_demand.add(name)
        else:
            self._registry.on_demand.discard(name)
        if request.prepare is not None:
            await request.prepare(loaded.config)
        self._registry.clear_failed(name)
        try:
            chosen = select_versions(loaded.config, available)
        except HostError as error:
            self._registry.set_no_versions(name, error.status_string)
            raise
        for number in chosen:
            await asyncio.to_thread(model_file_path, files.path, number, loaded.config)
        before = self._registry.versions(name)
        serving = frozenset(n for n, v in before.items() if v.state is VersionState.READY)
        in_place = {
            number: model
            for number in serving
            if not request.force and (model := before[number].model) is not None and model.ready
            if self._records.version(model).can_update_in_place(number, loaded.config, state)
        }
        return LoadPlan(name, files, state, loaded, override, chosen, before, serving, in_place)

    async def _read_config(
        self, name: str, files: ModelFiles, override: Override | None
    ) -> tuple[LoadedConfig, list[int]]:
        def read() -> tuple[LoadedConfig, list[int]]:
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
            run_agents(loaded.config, files.path, self._settings.agents)
            return loaded, list_served_versions(files.path, loaded.config)

        try:
            return await asyncio.to_thread(read)
        except HostError as error:
            raise RepositoryReadError(error.code, error.message) from error
        except OSError as error:
            text = f"failed to read model '{name}': {error}"
            raise RepositoryReadError(ErrorCode.INTERNAL, text) from error

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

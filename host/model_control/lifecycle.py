"""How models come and go: loading, replacing, unloading, and what the registry then says."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from weakref import WeakValueDictionary

from host.config import model_config as configuration
from host.errors import HostError, internal, invalid_argument, unavailable
from host.logs.formats import model_fields
from host.model_control.load_limiter import LoadLimiter
from host.models.loads import (
    FailureLog,
    LoadRequest,
    LoadSettings,
    ModelLoader,
    PrepareCallback,
    RepositoryReadError,
    VersionLoadError,
)
from host.models.registry import UNLOADED, LoadedModel, ModelVersion, Registry, VersionState
from host.models.updating import FileState, LoadedConfigs, LoadedFrom, UpdatedInPlace
from host.repository.agents import run_agents
from host.repository.override import ModelFiles, Override, UploadedDirectories
from host.repository.repository import (
    Fingerprint,
    Repository,
    compute_fingerprint,
    list_versions,
    model_file_path,
    select_versions,
)

_log = logging.getLogger("pbhost")

_OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)


class ModelLifecycle:
    """The only one that changes the registry. Belongs to the event loop; reads disks off it."""

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        loader: ModelLoader,
        settings: LoadSettings,
    ) -> None:
        self.slots = LoadLimiter(settings.threads)
        self._registry = registry
        self._repository = repository
        self._loader = loader
        self._settings = settings
        self._grace = settings.grace
        self._uploads = UploadedDirectories()
        self._closing = False
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sources = LoadedFrom()
        self._unloads: dict[str, int] = {}  # how many each model has seen
        self._reports = FailureLog()
        self._loads: set[asyncio.Task[bool]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._living: dict[LoadedModel, ModelFiles] = {}
        self._records = LoadedConfigs()

    # Loading

    def record_failure(self, name: str, error: HostError) -> None:
        """A model that is to be served could not be loaded."""
        if not self._registry.has_versions(name):  # else each version says it
            counts = not isinstance(error, RepositoryReadError)
            self._registry.set_failed(name, error.status_string, counts=counts)

    async def load(
        self,
        name: str,
        override: Override | None = None,
        *,
        polled: bool = False,
        anew: bool = False,
        prepare: PrepareCallback | None = None,
    ) -> bool:
        """Load a model, or bring it up to date: whether that has changed what is served.

        What served before serves until then. An override always loads anew, and `anew` says that
        there is another reason to. A configuration that an override brought holds for loads without
        one until the model's files change or it is unloaded; files that it brought do not.
        `prepare` gets the configuration before anything is made of it, and may raise HostError.
        `polled`: nobody has asked. Then a failure that was met before is no news for the log, and
        a model whose instances were given up is left so until its files change.

        Raises HostError; PollFailure if nothing has been tried.
        """
        if self._closing:
            raise unavailable("Server exiting")
        # Whoever asked may go away; that does not stop a load half-way.
        asked = LoadRequest(name, override, polled, anew, prepare, self._unloads.get(name, 0))
        loading = asyncio.get_running_loop().create_task(self._load(asked))
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(loading)

    async def _load(self, asked: LoadRequest) -> bool:
        name = asked.name
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            try:
                changed = await self._bring_up_to_date(asked)
            except HostError as error:
                for level, line in self._reports.lines_for(name, error, asked.polled):
                    _log.log(level, "%s", line, extra=model_fields(name))
                raise
            self._reports.clear(name)
            return changed

    async def _bring_up_to_date(self, asked: LoadRequest) -> bool:
        name, override = asked.name, asked.override
        files, look = await self._find_files(name, override)
        current = look is not None and self._sources.is_current(name, look.fingerprint)
        try:
            if current and override is None:
                if not asked.force and self._is_serving(name, asked.polled):
                    return False
                override = self._sources.override(name)
            loaded, available = await self._read_config(name, files, override)
            if asked.prepare is not None:
                await asked.prepare(loaded.config)
            self._registry.clear_failed(name)
            try:
                chosen = select_versions(loaded.config, available)
            except HostError as error:
                self._registry.set_no_versions(name, error.status_string)
                raise
            for number in chosen:
                await asyncio.to_thread(model_file_path, files.path, number, loaded.config)
            changed = await self._replace_versions(asked, files, look, loaded, chosen)
        finally:
            await self._release_files(files)
        self._sources.record(name, look, override)
        _log.info("successfully loaded '%s'", name, extra=model_fields(name))
        return changed

    async def _find_files(
        self, name: str, override: Override | None
    ) -> tuple[ModelFiles, FileState | None]:
        """Where to load from, and what that looks like if it is the repository."""
        try:
            if override is not None and override.files:
                path = await asyncio.to_thread(self._uploads.write, override.files)
                return ModelFiles(path, self._uploads), None
            path = (await asyncio.to_thread(self._repository.find_model_directory, name)).path
            seen = await asyncio.to_thread(compute_fingerprint, path)
            config = configuration.config_file(path, self._settings.config_name)
            return ModelFiles(path), FileState(path, seen, config)
        except HostError as error:
            raise RepositoryReadError(error.code, error.message) from error

    async def _read_config(
        self, name: str, files: ModelFiles, override: Override | None
    ) -> tuple[configuration.LoadedConfig, list[int]]:
        def read() -> tuple[configuration.LoadedConfig, list[int]]:
            loaded = configuration.load_config(
                files.path,
                strict=self._settings.strict,
                config_name=self._settings.config_name,
                override=None if override is None else override.config,
                gpus=self._settings.gpus,
                least_capability=self._settings.least_capability,
                name=self._registry.name_of(name),
            )
            loaded = dataclasses.replace(loaded, namespace=self._repository.namespace_of(name))
            run_agents(loaded.config, files.path, self._settings.agents)
            return loaded, list_versions(files.path)

        try:
            return await asyncio.to_thread(read)
        except HostError as error:
            raise RepositoryReadError(error.code, error.message) from error

    def _is_serving(self, name: str, polled: bool) -> bool:
        """Whether the model can be asked; if polled, whether it was once."""
        return any(
            version.state is VersionState.READY
            and version.model is not None
            and (polled or version.model.ready)
            for version in self._registry.versions(name).values()
        )

    async def _replace_versions(
        self,
        asked: LoadRequest,
        files: ModelFiles,
        look: FileState | None,
        loaded: configuration.LoadedConfig,
        chosen: list[int],
    ) -> bool:
        """Load the chosen versions; all of them take over, or none. Raises HostError.

        Those that may stay get other instances if they should; whether that is not all.
        """
        name = asked.name
        before = self._registry.versions(name)
        serving = {number for number, v in before.items() if v.state is VersionState.READY}
        stays = {
            number: version.model
            for number, version in before.items()
            if number in serving and version.model is not None and not asked.force
            if version.model.ready
            and self._records.can_update_in_place(version.model, loaded.config, look)
        }
        for number in chosen:
            if number in stays:
                continue
            _log.info("loading: %s:%d", name, number, extra=model_fields(name, number))
            if number not in serving:
                self._registry.set_version(name, ModelVersion(number, VersionState.LOADING))
        results = dict(
            zip(
                chosen,
                await asyncio.gather(
                    *(
                        self._load_version(name, files, number, loaded, stays.get(number))
                        for number in chosen
                    ),
                    return_exceptions=True,
                ),
                strict=True,
            )
        )
        outdated = self._unloads.get(name, 0) != asked.unloads
        if outdated or any(isinstance(result, BaseException) for result in results.values()):
            await self._roll_back(name, serving, set(stays), results, outdated)
        changed = set(before) != set(chosen)
        for number, result in results.items():
            assert not isinstance(result, BaseException)
            if isinstance(result, UpdatedInPlace):
                model = stays[number]
                result.update.commit()
                self._records.record(model, loaded.config, look)
                self._registry.set_version(
                    name, ModelVersion(number, VersionState.READY, model=model)
                )
                serving.discard(number)  # nothing is to be released
                continue
            changed = True
            self._records.record(result, loaded.config, look)
            files.acquire()
            self._living[result] = files
            elder = before[number].model if number in before else None  # it may be unloading
            if elder is not None:
                result.metrics.inherit_from(elder.metrics)
            self._registry.set_version(name, ModelVersion(number, VersionState.READY, model=result))
        for number, version in before.items():
            if number in serving:
                self._retire_version(name, version, replaced=number in chosen)
            elif number not in chosen and version.failed:
                self._registry.remove_version(name, number)  # its failure is of the past
        return changed

    async def _load_version(
        self,
        name: str,
        files: ModelFiles,
        number: int,
        loaded: configuration.LoadedConfig,
        stays: LoadedModel | None,
    ) -> LoadedModel | UpdatedInPlace:
        async with self.slots:
            if stays is not None:
                update = await self._loader.update(stays, loaded, self._settings.finalize)
                if update is not None:
                    return UpdatedInPlace(update)
            for left in reversed(range(self._settings.retries)):
                try:
                    return await self._loader.load(files.path, number, loaded)
                except HostError as error:
                    text = error.status_string
                    _log.warning(
                        "failed to load '%s' version %d: %s; tries left: %d",
                        name, number, text, left + 1, extra=model_fields(name, number),
                    )  # fmt: skip
            return await self._loader.load(files.path, number, loaded)

    async def _roll_back(
        self,
        name: str,
        serving: set[int],
        stays: set[int],
        results: dict[int, LoadedModel | UpdatedInPlace | BaseException],
        outdated: bool,
    ) -> None:
        """Give up the versions that came up, and say why. Always raises HostError."""
        texts: list[str] = []
        lines: list[str] = []
        for number, result in results.items():
            if isinstance(result, UpdatedInPlace):
                await result.update.discard()
                continue
            if not isinstance(result, BaseException):
                await result.stop(0, self._settings.finalize)
                state, reason = VersionState.UNAVAILABLE, UNLOADED
            else:
                error = result if isinstance(result, HostError) else internal(repr(result))
                if error is not result:
                    extra = model_fields(name, number)
                    _log.error("unexpected failure of a load", exc_info=result, extra=extra)
                state, reason = VersionState.UNAVAILABLE, error.status_string
                if number in stays:
                    state = VersionState.READY
                    self._registry.versions(name)[number].reason = reason
                texts.append(f"version {number} is at {state.value} state: {reason};")
                lines.append(f"failed to load '{name}' version {number}: {reason}")
            if number not in serving:
                self._registry.set_version(name, ModelVersion(number, state, reason))
        if outdated:
            raise invalid_argument(_OUTDATED)
        raise VersionLoadError("".join(texts), lines)

    # Unloading

    def unload(self, name: str) -> None:
        """Begin to unload a model; a load of it that is under way comes to nothing."""
        known = self._registry.versions(name).values()
        self._registry.clear_failed(name)
        if not known and name not in self._locks:
            return
        self._unloads[name] = self._unloads.get(name, 0) + 1
        self._sources.forget(name)
        for version in known:
            if version.state is VersionState.READY:
                self._retire_version(name, version)

    def remove_model(self, name: str) -> None:
        """Unload a model that is not to be served any more; that it failed no longer counts."""
        self.unload(name)
        self._reports.clear(name)
        self._registry.forget_failures(name)

    def _retire_version(self, name: str, version: ModelVersion, replaced: bool = False) -> None:
        """Let a version finish its work and go. A replaced one is no longer in the registry."""
        if not replaced:
            version.state = VersionState.UNLOADING
            self._registry.state_changed()
        task = asyncio.get_running_loop().create_task(self._drain_and_stop(name, version, replaced))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _drain_and_stop(self, name: str, version: ModelVersion, replaced: bool) -> None:
        model = version.model
        assert model is not None
        await model.drain()
        await model.stop(self._grace, self._settings.finalize)
        self._records.forget(model)
        await self._release_files(self._living.pop(model))
        version.model = None
        if not replaced:
            version.state, version.reason = VersionState.UNAVAILABLE, UNLOADED
            self._registry.state_changed()
        extra = model_fields(name, version.number)
        _log.info("successfully unloaded '%s' version %d", name, version.number, extra=extra)

    async def _release_files(self, files: ModelFiles) -> None:
        if files.release():
            await asyncio.to_thread(files.remove)

    # What is there

    async def resolve_step_models(self, ensemble: str, names: Iterable[str]) -> dict[str, str]:
        """The identities of the models that an ensemble calls by these names."""
        return await asyncio.to_thread(self._repository.resolve_step_models, ensemble, names)

    def is_current(self, name: str, seen: Fingerprint) -> bool:
        """Whether a model was loaded from a directory that looked like this."""
        return self._sources.is_current(name, seen) and self._is_serving(name, polled=True)

    def living_models(self) -> list[LoadedModel]:
        """Every model that is alive, also those that only finish their work."""
        return list(self._living)

    # The end

    def abort_all(self, error: HostError) -> None:
        """Stop waiting for what still runs: its callers get this error."""
        self._grace = 0.0
        for model in self.living_models():
            model.abort(error)

    async def unload_all(self) -> None:
        """Unload everything and wait until it is gone; loads under way are given up."""
        self._closing = True
        for loading in self._loads:
            loading.cancel()
        if self._loads:
            await asyncio.wait(self._loads)
        for name, entry in self._registry.list_entries():
            for version in entry.versions.values():
                if version.state is VersionState.READY:
                    self._retire_version(name, version)
        if self._releases:
            await asyncio.wait(self._releases)

    def close(self) -> None:
        """All stubs have ended: remove what they were loaded from, if it came with loads."""
        self._uploads.close()

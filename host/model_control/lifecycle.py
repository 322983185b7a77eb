"""The life of models: loading, replacing and unloading their versions.

A load has two halves. The first plans (`LoadPlanner`): which versions are loaded, which only get
other instances, which are replaced. The second executes the plan; either all versions take over,
or none does and everything stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from weakref import WeakValueDictionary

from host.config.model_config import ModelConfig
from host.config.schema import is_ensemble
from host.errors import HostError, internal, invalid_argument, unavailable
from host.logs.formats import model_fields
from host.model_control.load_failures import LoadFailureLog
from host.model_control.load_limiter import LoadLimiter
from host.model_control.load_planner import LoadPlan, LoadPlanner, LoadRequest, PrepareCallback
from host.model_control.load_records import LoadRecords
from host.models.lendable_semaphore import LendableSemaphore
from host.models.loading import (
    InstanceUpdate,
    LoadAdmission,
    Loaders,
    LoadSettings,
    RepositoryReadError,
    VersionLoadError,
)
from host.models.registry import UNLOADED, LoadedModel, ModelVersion, Registry, VersionState
from host.remote.remote_models import RemoteModels
from host.repository.override import ModelFiles, Override, UploadedDirectories
from host.repository.repository import (
    Fingerprint,
    FingerprintFunction,
    Repository,
    compute_fingerprint,
)

_log = logging.getLogger("pbhost")

_OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)


@dataclass(frozen=True, slots=True)
class _InPlace:
    """The outcome for a version that stays loaded."""

    update: InstanceUpdate


LoadResult = LoadedModel | _InPlace


class ModelLifecycle:
    """Loads and unloads models; with its planner the only writer of the registry.

    Belongs to the event loop; reads disks in threads.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        loaders: Loaders,
        settings: LoadSettings,
        uploads: UploadedDirectories,
        fingerprint: FingerprintFunction = lambda name, path: compute_fingerprint(path),
        initializing: LendableSemaphore | None = None,
    ) -> None:
        self.limiter = LoadLimiter(settings.threads)
        self.initializing = initializing or LendableSemaphore(0)
        """The slots that instances of all models hold while they initialise."""
        self.admission: LoadAdmission | None = None
        """Makes loads wait for memory; None without a memory budget."""
        self.remote: RemoteModels | None = None
        """The models of other servers, which are not loaded here."""
        self._registry = registry
        self._repository = repository
        self._loaders = loaders
        self._settings = settings
        self._grace = settings.grace
        self._closing = False
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._records = LoadRecords()
        self._planner = LoadPlanner(
            registry, repository, self._records, settings, uploads, fingerprint
        )
        self._failures = LoadFailureLog()
        self._loads: set[asyncio.Task[bool]] = set()
        self._retirements: dict[asyncio.Task[None], str] = {}  # and the models

    # Loading

    def record_failure(self, name: str, error: HostError) -> None:
        """Enters the failed load of a model that should be served into the registry."""
        if not self._registry.has_versions(name):  # otherwise each version has its own reason
            counts = not isinstance(error, RepositoryReadError)
            self._registry.set_failed(name, error.status_string, counts=counts)

    async def load(
        self,
        name: str,
        override: Override | None = None,
        *,
        polled: bool = False,
        if_missing: bool = False,
        force: bool = False,
        prepare: PrepareCallback | None = None,
    ) -> bool:
        """Loads a model or brings it up to date; returns whether that changed what is served.

        The versions that serve go on until the new ones are ready. An override always reloads the
        model, and so does `force`. The configuration of an override holds for later loads without
        one until the model's files change or the model is unloaded; uploaded files do not.
        `prepare` gets the configuration before the load begins. `polled`: the poller asked for the
        load. Then a failure that was logged before is not logged again, and a model whose instances
        were given up is left alone until its files change. `if_missing`: a model that serves is
        left alone, even if its files have changed.

        Raises HostError; RepositoryReadError if nothing was attempted.
        """
        if self._closing:
            raise unavailable("Server exiting")
        if self.remote is not None and self.remote.serves(name):
            return await self.remote.learn(name)
        unloads = self._records.find(name).unloads
        request = LoadRequest(name, override, polled, if_missing, force, prepare, unloads)
        # The load goes on if its caller is cancelled.
        loading = asyncio.get_running_loop().create_task(self._load(request))
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(loading)

    async def _load(self, request: LoadRequest) -> bool:
        name = request.name
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            try:
                changed = await self._plan_and_execute(request)
            except HostError as error:
                for level, line in self._failures.lines_for(name, error, request.polled):
                    _log.log(level, "%s", line, extra=model_fields(name))
                raise
            self._failures.clear(name)
            self._records.create(name).override_outlasts_changes = request.override is not None
            return changed

    async def _plan_and_execute(self, request: LoadRequest) -> bool:
        files, state = await self._planner.find_files(request.name, request.override)
        try:
            plan = await self._planner.plan(request, files, state)
            if plan is None:
                return False
            changed = await self._execute_when_admitted(plan, request.unloads)
        finally:
            await self._release_files(files)
        record = self._records.create(request.name)
        record.fingerprint = None if state is None else state.fingerprint
        record.override = None if plan.override is None else Override(plan.override.config)
        _log.info("successfully loaded '%s'", request.name, extra=model_fields(request.name))
        return changed

    async def _execute_when_admitted(self, plan: LoadPlan, unloads: int) -> bool:
        """As `_execute_plan`, once there is memory for it."""
        name, config = plan.name, plan.loaded.config
        made = [number for number in plan.chosen if number not in plan.in_place]
        for number in made:
            if number not in plan.serving:
                self._registry.set_version(name, ModelVersion(number, VersionState.LOADING))
        if self.admission is None or is_ensemble(config):
            return await self._execute_plan(plan, unloads)
        files = None if plan.state is None else plan.state.fingerprint
        async with AsyncExitStack() as stack:
            try:
                admission = self.admission.admit(name, config, files, len(made))
                settle = await stack.enter_async_context(admission)
            except HostError as error:
                for number in made:
                    self._set_unavailable(plan, number, error.status_string)
                raise
            return await self._execute_plan(plan, unloads, settle)

    async def _execute_plan(
        self,
        plan: LoadPlan,
        unloads: int,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Loads what the plan says; returns whether the served versions changed.

        `settle` is called when all instances are made, and may raise HostError. Raises HostError
        if a version or `settle` failed, or if the model was unloaded meanwhile. Then the versions
        that served before go on.
        """
        name = plan.name
        for number in plan.chosen:
            if number not in plan.in_place:
                _log.info("loading: %s:%d", name, number, extra=model_fields(name, number))
        loads = (self._load_version(plan, number) for number in plan.chosen)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        outdated = self._records.find(name).unloads != unloads
        results: dict[int, LoadResult] = {}
        errors: dict[int, BaseException] = {}
        for number, outcome in zip(plan.chosen, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors[number] = outcome
            else:
                results[number] = outcome
        if settle is not None and results and not errors:
            try:
                await settle()
            except HostError as refusal:
                errors = dict.fromkeys(results, refusal)
        if outdated or errors:
            await self._roll_back(plan, results, errors, outdated)
        changed = self._commit(plan, results)
        for result in results.values():
            if isinstance(result, _InPlace):
                await result.update.wait_ended()
        return changed

    async def _load_version(self, plan: LoadPlan, number: int) -> LoadResult:
        async with self.limiter:
            model = plan.in_place.get(number)
            if model is not None:
                update = await self._loaders.find_loader(plan.loaded.config).update(
                    model, plan.loaded, self._settings.finalize
                )
                if update is not None:
                    return _InPlace(update)
            for left in reversed(range(self._settings.retries)):
                try:
                    return await self._load_once(plan, number)
                except HostError as error:
                    _log.warning(
                        "failed to load '%s' version %d: %s; tries left: %d",
                        plan.name, number, error.status_string, left + 1,
                        extra=model_fields(plan.name, number),
                    )  # fmt: skip
            return await self._load_once(plan, number)

    async def _load_once(self, plan: LoadPlan, number: int) -> LoadedModel:
        """Loads a version, with the hooks of all loads. Raises HostError."""
        directory, loaded = plan.files.path, plan.loaded
        for hook in self._loaders.hooks:
            hook.before_load(loaded)
        model = await self._loaders.find_loader(loaded.config).load(directory, number, loaded)
        try:
            for hook in self._loaders.hooks:
                await hook.after_load(model, directory, loaded)
        except BaseException:  # also if cancelled, as the model has no other owner
            await model.stop(0, self._settings.finalize)
            raise
        return model

    def _commit(self, plan: LoadPlan, results: Mapping[int, LoadResult]) -> bool:
        """Lets the new versions serve; returns whether more than instances changed."""
        name = plan.name
        changed = set(plan.before) != set(plan.chosen)
        replaced = set(plan.serving)
        for number, result in results.items():
            if isinstance(result, _InPlace):
                model = plan.in_place[number]
                result.update.commit()
                self._records.update_version(model, plan.state, plan.loaded.config)
                replaced.discard(number)
            else:
                changed = True
                model = result
                self._records.add_version(model, plan.files, plan.state, plan.loaded.config)
                # The predecessor may still be unloading.
                predecessor = plan.before[number].model if number in plan.before else None
                if predecessor is not None:
                    model.metrics.inherit_from(predecessor.metrics)
            self._registry.set_version(name, ModelVersion(number, VersionState.READY, model=model))
        for number, version in plan.before.items():
            if number in replaced:
                self._retire_version(name, version, replaced=number in plan.chosen)
            elif number not in plan.chosen and version.failed:
                self._registry.remove_version(name, number)  # the failure is of no interest now
        return changed

    async def _roll_back(
        self,
        plan: LoadPlan,
        results: Mapping[int, LoadResult],
        errors: Mapping[int, BaseException],
        outdated: bool,
    ) -> None:
        """Stops what the load brought up, and raises HostError with the reasons."""
        name = plan.name
        for number, result in results.items():
            if isinstance(result, _InPlace):
                await result.update.discard()
            else:
                await result.stop(0, self._settings.finalize)
                self._set_unavailable(plan, number, UNLOADED)
        texts: list[str] = []
        lines: list[str] = []
        for number, exception in errors.items():
            if isinstance(exception, HostError):
                reason = exception.status_string
            else:
                reason = internal(repr(exception)).status_string
                extra = model_fields(name, number)
                _log.error("unexpected failure of a load", exc_info=exception, extra=extra)
            state = VersionState.UNAVAILABLE
            if number in plan.in_place:
                state = VersionState.READY
                self._registry.versions(name)[number].reason = reason
            self._set_unavailable(plan, number, reason)
            texts.append(f"version {number} is at {state.value} state: {reason};")
            lines.append(f"failed to load '{name}' version {number}: {reason}")
        if outdated:
            raise invalid_argument(_OUTDATED)
        raise VersionLoadError("".join(texts), lines)

    def _set_unavailable(self, plan: LoadPlan, number: int, reason: str) -> None:
        """Enters a version that did not come up, unless one with its number serves."""
        if number not in plan.serving:
            version = ModelVersion(number, VersionState.UNAVAILABLE, reason)
            self._registry.set_version(plan.name, version)

    # Unloading

    def unload(self, name: str, keep_override: bool = False) -> None:
        """Starts to unload a model; a load of it in progress is given up.

        `keep_override`: a later load because of an ensemble uses the override again. A model of
        another server is left alone.
        """
        if self.remote is not None and self.remote.serves(name):
            return
        versions = self._registry.versions(name).values()
        self._registry.clear_failed(name)
        if not keep_override:
            record = self._records.find(name)
            record.override, record.override_outlasts_changes = None, False
        if not versions and name not in self._locks:
            return
        record = self._records.create(name)
        record.unloads += 1
        record.fingerprint = None
        for version in versions:
            if version.state is VersionState.READY:
                self._retire_version(name, version)

    def remove_model(self, name: str) -> None:
        """Unloads a model that should not be served any more, and drops its failures."""
        self.unload(name)
        self._failures.clear(name)
        self._registry.forget_failures(name)

    def _retire_version(self, name: str, version: ModelVersion, replaced: bool = False) -> None:
        """Drains and stops a version. A replaced one is no longer in the registry."""
        if not replaced:
            version.state = VersionState.UNLOADING
            self._registry.state_changed()
        task = asyncio.get_running_loop().create_task(self._drain_and_stop(name, version, replaced))
        self._retirements[task] = name
        task.add_done_callback(self._retirements.pop)

    async def _drain_and_stop(self, name: str, version: ModelVersion, replaced: bool) -> None:
        model = version.model
        assert model is not None
        await model.drain()
        await model.stop(self._grace, self._settings.finalize)
        await self._release_files(self._records.remove_version(model))
        version.model = None
        if not replaced:
            version.state, version.reason = VersionState.UNAVAILABLE, UNLOADED
            self._registry.state_changed()
        extra = model_fields(name, version.number)
        _log.info("successfully unloaded '%s' version %d", name, version.number, extra=extra)

    async def _release_files(self, files: ModelFiles) -> None:
        if files.release():
            await asyncio.to_thread(files.remove)

    # Lookups

    def find_models_on_demand(self) -> set[str]:
        """The models on disk that load on demand, by qualified name. Blocks."""
        return self._planner.find_models_on_demand()

    def read_unchecked_config(self, name: str) -> ModelConfig:
        """The configuration file of a model, whose load parameters are valid. Blocks.

        Raises HostError if the model is not on disk, or if the file is not valid.
        """
        return self._planner.read_unchecked_config(name)

    async def resolve_step_models(self, ensemble: str, names: Iterable[str]) -> dict[str, str]:
        """The qualified names of the models that an ensemble calls by these names."""
        return await asyncio.to_thread(self._repository.resolve_step_models, ensemble, names)

    def serves(self, name: str) -> bool:
        """Whether a version of the model is ready."""
        return self._planner.is_serving(name, polled=True)

    def is_current(self, name: str, fingerprint: Fingerprint) -> bool:
        """Whether a model serves that was loaded from a directory with this fingerprint."""
        return self._records.is_current(name, fingerprint) and self._planner.is_serving(
            name, polled=True
        )

    def retiring_models(self) -> set[str]:
        """The models of which a version finishes its work, or stops."""
        return set(self._retirements.values())

    def has_override(self, name: str) -> bool:
        """Whether a client's configuration or files are in force, which an unload would lose."""
        record = self._records.find(name)
        return record.override is not None or record.fingerprint is None

    def override_config(self, name: str) -> str:
        """The configuration in force that a client gave, in JSON; "" if there is none."""
        override = self._records.find(name).override
        return "" if override is None else override.config

    def lasting_override(self, name: str) -> Override | None:
        """The override that a load because of an ensemble has to keep, if there is one."""
        record = self._records.find(name)
        return record.override if record.override_outlasts_changes else None

    def living_models(self) -> list[LoadedModel]:
        """Every version that is alive, including those that only finish their work."""
        return self._records.living_models()

    # Shutdown

    def abort_all(self, error: HostError) -> None:
        """Ends every call in progress with this error."""
        self._grace = 0.0
        for model in self.living_models():
            model.abort(error)

    async def unload_all(self) -> None:
        """Unloads every model and waits until all have stopped; cancels loads in progress."""
        self._closing = True
        for loading in self._loads:
            loading.cancel()
        if self._loads:
            await asyncio.wait(self._loads)
        for name, entry in self._registry.list_entries():
            for version in entry.versions.values():
                if version.state is VersionState.READY:
                    self._retire_version(name, version)
        if self._retirements:
            await asyncio.wait(self._retirements)

"""The life of the versions of models: loads, replaces and unloads them.

A load has two halves. The first plans (`LoadPlanner`): which models are loaded, which of their
versions, which only get other instances, which are replaced. The second executes the plan; of each
model, either all versions take over, or none does and everything stays as it was.

A load takes these locks, in this order; it waits for another load only while it holds none that
this one may want:

1. the turn of the model's name (`ModelControl`), if a client asks; given back at once, as it only
   orders the load after earlier unloads
2. the lock of an ensemble (`lock_model`), before those of its step models
3. the lock of the model
4. memory for it (`LoadAdmission`), if there is a memory budget
5. a slot for each version (`LoadLimiter`); lent to the loads that `initialize` asks for
6. for each instance that initialises, the resources that it needs (`Permit.held`), with the rate
   limiter
7. a slot for each instance that initialises (`LendableSemaphore`): one of its model, then one of
   all models; the latter is lent like that of the version
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from host.config.schema import is_ensemble
from host.errors import HostError, internal, invalid_argument, unavailable
from host.logs.formats import model_fields
from host.model_control.load_planner import LoadPlanner, PlannedModel, VersionPlan
from host.model_control.load_records import LoadRecords
from host.models.loaders import (
    InstanceUpdate,
    LendableSemaphore,
    LoadAdmission,
    Loaders,
    LoadSettings,
    RepositoryReadError,
    VersionLoadError,
)
from host.models.registry import UNLOADED, LoadedModel, ModelVersion, Registry, VersionState
from host.remote_models import RemoteModels
from host.repository.fingerprint import Fingerprint, FingerprintFunction, compute_fingerprint
from host.repository.override import ModelFiles, Override, UploadedDirectories
from host.repository.repository import Repository


class LoadLimiter(LendableSemaphore):
    """A semaphore of `count` slots that every load of a version holds. Belongs to the event loop.

    A model may load other models in its `initialize`. Its own load gives its slot back while it
    waits for them, so that even one slot is enough. A load that would wait for itself is refused.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._waits: dict[str, list[str]] = {}

    @contextmanager
    def lend_slot(self, requester: str, target: str) -> Iterator[None]:
        """While entered, the load of model `requester` waits for that of `target`, without a slot.

        Raises HostError INVALID_ARG if neither load could ever end.
        """
        chain = self.find_wait_chain(target, requester)
        if chain:
            raise invalid_argument(
                f"'initialize' of model '{requester}' requests it, and would wait for itself:"
                f" {' -> '.join([requester, *chain])}. Load one of them before the others, or from"
                " 'execute'"
            )
        with self.waits_for(requester, target), self.lend():
            yield

    @contextmanager
    def waits_for(self, requester: str, target: str) -> Iterator[None]:
        """While entered, the load of `requester`, which holds no slot yet, waits for `target`."""
        self._waits.setdefault(requester, []).append(target)
        try:
            yield
        finally:
            self._waits[requester].remove(target)
            if not self._waits[requester]:
                del self._waits[requester]

    def find_wait_chain(self, start: str, end: str) -> list[str]:
        """The models from `start` to `end`, each waiting for the next; empty without a chain."""
        if start == end:
            return [end]
        for following in self._waits.get(start, ()):
            rest = self.find_wait_chain(following, end)
            if rest:
                return [start, *rest]
        return []


_log = logging.getLogger("pbhost")

_Result = TypeVar("_Result")

_OUTDATED = (
    "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
)


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


LoadResult = tuple[LoadedModel, InstanceUpdate | None]
"""A version, and the instances that it gets if it stays loaded."""


async def _settle_outcomes(
    plan: VersionPlan,
    outcomes: Sequence[LoadResult | BaseException],
    settle: Callable[[], Awaitable[None]] | None,
) -> tuple[dict[int, LoadResult], dict[int, BaseException]]:
    """Tells versions that were loaded from those that failed: all, if they do not fit in memory."""
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
    return results, errors


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
        remote: RemoteModels | None = None,
    ) -> None:
        self.limiter = LoadLimiter(settings.threads)
        self.initializing = initializing or LendableSemaphore(0)
        """The slots that instances of all models hold while they initialise."""
        self.admission: LoadAdmission | None = None
        """Makes loads wait for memory; None without a memory budget."""
        self._registry = registry
        self._repository = repository
        self._loaders = loaders
        self._settings = settings
        self._grace = settings.grace
        self._closing = False
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._records = LoadRecords()
        self.planner = LoadPlanner(
            registry, repository, self._records, settings, uploads, fingerprint, remote
        )
        self._failures = LoadFailureLog()
        self._loads: set[asyncio.Task[Any]] = set()
        self._retirements: dict[asyncio.Task[None], str] = {}  # and the models
        self._surplus: dict[asyncio.Task[None], str] = {}  # stop busy instances; and the models

    # Loading

    def record_failure(self, name: str, error: HostError) -> None:
        """Enters the failed load of a model that should be served into the registry."""
        if not self._registry.has_versions(name):  # otherwise each version has its own reason
            counts = not isinstance(error, RepositoryReadError)
            self._registry.set_failed(name, error.status_string, counts=counts)

    def start_load(self, load: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Runs a load, which continues if its caller is cancelled, until the server stops.

        Raises HostError if it is stopping.
        """
        if self._closing:
            load.close()
            raise unavailable("Server exiting")
        task = asyncio.get_running_loop().create_task(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    @asynccontextmanager
    async def lock_model(self, planned: PlannedModel) -> AsyncIterator[PlannedModel]:
        """Holds the lock of a model for its load, and logs the failure of the load.

        Yields the model as it is to be loaded: it is read again if another load or an unload of the
        model came first. Raises the error of the plan.
        """
        name, request = planned.name, planned.request
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                try:
                    if self._is_outdated(planned):
                        await self._release_plan(planned)
                        again = await self.planner.read(
                            name, request, planned.reason, with_config=True
                        )
                        planned = dataclasses.replace(again, unloads=planned.unloads)
                    self.planner.note_on_demand(planned)
                    if planned.error is not None:
                        raise planned.error
                    yield planned
                except HostError as error:
                    for level, line in self._failures.lines_for(name, error, request.polled):
                        _log.log(level, "%s", line, extra=model_fields(name))
                    raise
                self._failures.clear(name)
                record = self._records.create(name)
                record.loads += 1
                record.override_outlasts_changes = request.override is not None
        finally:
            await self._release_plan(planned)

    def _is_outdated(self, planned: PlannedModel) -> bool:
        """Whether a model has to be read again: another load came first, or the model has gone."""
        if planned.is_uploaded:
            return False
        if planned.loads != self._records.find(planned.name).loads:
            return True
        left_out = planned.loaded is None and planned.error is None
        return left_out and not self.planner.is_up_to_date(planned)

    async def load_versions(self, planned: PlannedModel, force: bool = False) -> bool:
        """Loads a model or brings it up to date; returns whether that changed what is served.

        The caller holds the lock of the model (`lock_model`), whose step models are loaded. The
        versions that serve continue until the new ones are ready, and stay if one of these fails,
        or if the model was unloaded meanwhile. An override always reloads the model, and so does
        `force`. The configuration of an override holds for later loads without one until the
        model's files change or the model is unloaded; uploaded files do not.

        Raises HostError; RepositoryReadError if nothing was attempted.
        """
        if not force and self.planner.is_up_to_date(planned):
            return False
        plan = await self.planner.plan_versions(planned, force)
        name = plan.name
        made = [number for number in plan.chosen if number not in plan.in_place]
        for number in made:
            if number not in plan.serving:
                self._registry.set_version(name, ModelVersion(number, VersionState.LOADING))
        async with AsyncExitStack() as stack:
            try:
                plan = await self.planner.fetch(planned, plan)
                stack.push_async_callback(self._release_files, plan.files)
                files = None if plan.state is None else plan.state.fingerprint
                settle = await self._admit(plan, files, len(made), stack)
            except HostError as error:
                for number in made:
                    self._set_unavailable(plan, number, error.status_string)
                raise
            for number in made:
                _log.info("loading: %s:%d", name, number, extra=model_fields(name, number))
            loads = (self._load_version(plan, number) for number in plan.chosen)
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            outdated = self._records.find(name).unloads != planned.unloads
            results, errors = await _settle_outcomes(plan, outcomes, settle)
            if outdated or errors:
                await self._roll_back(plan, results, errors, outdated)
            changed = self._commit(plan, results)
            for _, update in results.values():
                if update is not None:
                    await update.wait_ended()
        record = self._records.create(name)
        record.fingerprint = files
        record.override = None if plan.override is None else Override(plan.override.config)
        _log.info("successfully loaded '%s'", name, extra=model_fields(name))
        return changed

    async def _admit(
        self, plan: VersionPlan, files: Fingerprint | None, versions: int, stack: AsyncExitStack
    ) -> Callable[[], Awaitable[None]] | None:
        """Waits for memory, if there is a budget, and keeps it until `stack` ends.

        Returns what to call when all instances are made, see `LoadAdmission`. Raises HostError.
        """
        config = plan.loaded.config
        if self.admission is None or is_ensemble(config):
            return None
        admission = self.admission.admit(plan.name, config, files, versions)
        return await stack.enter_async_context(admission)

    async def wait_surplus_ended(self, names: Collection[str]) -> None:
        """Waits until the busy instances that loads took away from these models have ended.

        The wait is limited like a step of a load. Instances that have sequences are not waited for.
        """
        ending = [task for task, name in self._surplus.items() if name in names]
        if ending:
            await asyncio.wait(ending, timeout=self._settings.step or None)

    async def _release_plan(self, planned: PlannedModel) -> None:
        if planned.files is not None:
            await self._release_files(planned.files)

    async def _load_version(self, plan: VersionPlan, number: int) -> LoadResult:
        """Loads a version, with the hooks of all loads, or prepares its other instances.

        Raises HostError, after the tries that the settings allow.
        """
        directory, loaded = plan.files.path, plan.loaded
        loader, finalize = self._loaders.find_loader(loaded.config), self._settings.finalize
        async with self.limiter:
            model = plan.in_place.get(number)
            if model is not None:
                update = await loader.update(model, loaded, finalize)
                if update is not None:
                    return model, update
            left = self._settings.retries
            while True:
                try:
                    for hook in self._loaders.hooks:
                        hook.before_load(loaded)
                    model = await loader.load_version(directory, number, loaded)
                    await self._run_hooks_after_load(model, plan)
                except HostError as error:
                    if not left:
                        raise
                    _log.warning(
                        "failed to load '%s' version %d: %s; tries left: %d",
                        plan.name, number, error.status_string, left,
                        extra=model_fields(plan.name, number),
                    )  # fmt: skip
                    left -= 1
                else:
                    return model, None

    async def _run_hooks_after_load(self, model: LoadedModel, plan: VersionPlan) -> None:
        try:
            for hook in self._loaders.hooks:
                await hook.after_load(model, plan.files.path, plan.loaded)
        except BaseException:  # also if cancelled, as the model has no other owner
            await model.stop(0, self._settings.finalize)
            raise

    def _commit(self, plan: VersionPlan, results: Mapping[int, LoadResult]) -> bool:
        """Lets the new versions serve; returns whether more than instances changed."""
        name = plan.name
        changed = set(plan.before) != set(plan.chosen)
        replaced = set(plan.serving)
        for number, (model, update) in results.items():
            if update is not None:
                for ending in update.commit():
                    self._surplus[ending] = name
                    ending.add_done_callback(self._surplus.pop)
                self._records.update_version(model, plan.state, plan.loaded.config)
                replaced.discard(number)
            else:
                changed = True
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
        plan: VersionPlan,
        results: Mapping[int, LoadResult],
        errors: Mapping[int, BaseException],
        outdated: bool,
    ) -> None:
        """Stops what the load brought up, and raises HostError with the reasons."""
        name = plan.name
        for number, (model, update) in results.items():
            if update is not None:
                await update.discard()
            else:
                await model.stop(0, self._settings.finalize)
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

    def _set_unavailable(self, plan: VersionPlan, number: int, reason: str) -> None:
        """Marks a version that failed to load as unavailable, unless its number is served."""
        if number not in plan.serving:
            version = ModelVersion(number, VersionState.UNAVAILABLE, reason)
            self._registry.set_version(plan.name, version)

    # Unloading

    def unload(self, name: str, keep_override: bool = False) -> None:
        """Starts to unload a model; a load of it in progress is given up.

        `keep_override`: a later load because of an ensemble uses the override again. A model of
        another server is left alone.
        """
        if self.planner.is_remote(name):
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
        """Unloads a model that should no longer be served, and drops its failures."""
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
        await model.drain(sequences=self._closing)  # as in Triton; an unload ends sequences
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

    def retiring_models(self) -> set[str]:
        """The models that have a version which is finishing its work or stopping."""
        return set(self._retirements.values())

    def has_override(self, name: str) -> bool:
        """Whether a client's configuration or files are in force, which an unload would lose."""
        record = self._records.find(name)
        return record.override is not None or record.fingerprint is None

    def override_config(self, name: str) -> str:
        """The configuration in force that a client gave, in JSON; "" if there is none."""
        override = self._records.find(name).override
        return "" if override is None else override.config

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

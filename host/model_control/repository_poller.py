"""The repository poller: loads new and changed models, and unloads deleted ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from host.errors import HostError
from host.logs.formats import model_fields
from host.model_control.dependencies import EnsembleDependencies, LoadOrder
from host.model_control.load_planner import LoadRequest
from host.models.registry import Registry
from host.repository.fingerprint import Fingerprint, FingerprintFunction
from host.repository.repository import Repository, RepositoryScan
from stub.wire.paths import path_from_here

_log = logging.getLogger("pbhost")

_MAX_NAMED_FILES = 3


@dataclass(frozen=True, slots=True)
class RepositoryState:
    """The models on disk, their fingerprints, and errors of models without one."""

    scan: RepositoryScan
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def read_state(repository: Repository, fingerprint: FingerprintFunction) -> RepositoryState:
    """Scans the repositories once. Blocks.

    A model whose directory cannot be read stays as it is.
    """
    state = RepositoryState(repository.scan())
    for name, directory in state.scan.models.items():
        if directory.duplicated:
            continue
        try:
            state.fingerprints[name] = directory.fingerprint(name, fingerprint)
        except HostError as error:
            state.failures.append(f"failed to poll model '{name}': {error.message}")
    return state


class RepositoryPoller:
    """Scans the repositories every `seconds`, in a thread.

    A model that failed to load is tried again at each scan. With `started_with`, the fingerprints
    before the models were first loaded, it is tried again only when a file of a model changes.

    Source: docs/reference/model-control.md, "Control modes".
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        dependencies: EnsembleDependencies,
        seconds: float,
        fingerprint: FingerprintFunction,
        started_with: Mapping[str, Fingerprint] | None = None,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._dependencies = dependencies
        self._seconds = seconds
        self._fingerprint = fingerprint
        self._seen = None if started_with is None else dict(started_with)
        self._warnings: list[str] = []
        self._loading: dict[str, asyncio.Task[bool]] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._poll()
            except Exception:  # one scan may fail; the next one tries again
                _log.exception("a poll of the model repositories failed")
            await asyncio.sleep(self._seconds)

    async def _poll(self) -> None:
        """Scans once and starts loads and unloads. A model that still loads is left alone."""
        await self._repository.refresh()
        state = await asyncio.to_thread(read_state, self._repository, self._fingerprint)
        scan = state.scan
        planner = self._dependencies.lifecycle.planner
        on_demand = await asyncio.to_thread(planner.find_models_on_demand)
        self._registry.on_demand.clear()
        self._registry.on_demand |= on_demand
        warnings = [*scan.warnings, *state.failures]
        if warnings != self._warnings:
            self._warnings = warnings
            for text in warnings:
                _log.error("%s", text)
        outdated = [
            name
            for name, fingerprint in state.fingerprints.items()
            if name not in self._loading
            and (name not in on_demand or planner.serves(name))
            and not planner.is_current(name, fingerprint)
        ]
        for name, directory in scan.models.items():
            if directory.duplicated:
                self._dependencies.unload(name)
        if self._has_changed(state.fingerprints, outdated):
            # A failure that a poll meets again without a change has been reported before.
            request = LoadRequest(polled=self._seen is None)
            order = LoadOrder(self._dependencies, outdated, request)
            for name in outdated:
                self._start_load(name, order)
        if not scan.failures:  # otherwise a model may lie in a folder that cannot be read
            for name in self._registry.names() - scan.models.keys():
                self._dependencies.remove_model(name)

    def _has_changed(
        self, fingerprints: Mapping[str, Fingerprint], outdated: Iterable[str]
    ) -> bool:
        """Whether outdated models should be loaded. Logs their changed files."""
        if self._seen is None:
            return True
        changed = False
        for name in outdated:
            before = self._seen.get(name, frozenset())
            if fingerprints[name] != before:
                changed = True
                _log.info(
                    "files of '%s' have changed: %s",
                    name,
                    _name_files(fingerprints[name] ^ before),
                    extra=model_fields(name),
                )
        loading = {name: seen for name, seen in self._seen.items() if name in self._loading}
        self._seen = {**fingerprints, **loading}  # a change during a load is met after it
        return changed

    def _start_load(self, name: str, order: LoadOrder) -> None:
        loading = asyncio.get_running_loop().create_task(order.try_load(name))
        self._loading[name] = loading
        loading.add_done_callback(lambda _: self._loading.pop(name))

    async def close(self) -> None:
        """Stops polling."""
        tasks = [self._task, *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _name_files(entries: Fingerprint) -> str:
    """The names of changed files, without those of folders if there are others."""
    files = {path for path, changed, size in entries if changed or size}
    names = sorted({path_from_here(path) for path in files or {path for path, _, _ in entries}})
    more = len(names) - _MAX_NAMED_FILES
    return ", ".join(names[:_MAX_NAMED_FILES]) + (f" and {more} more" if more > 0 else "")

"""The repository poller: loads new and changed models, and unloads deleted ones."""

from __future__ import annotations

import asyncio
import logging

from host.errors import HostError
from host.model_control.dependencies import EnsembleDependencies, LoadOrder
from host.models.registry import Registry
from host.repository.repository import Fingerprint, Repository, RepositoryScan, compute_fingerprint

_log = logging.getLogger("pbhost")


class RepositoryPoller:
    """Scans the repositories every `seconds`, in a thread.

    Source: docs/reference/configuration_and_scheduling.md, 8.5.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        dependencies: EnsembleDependencies,
        seconds: float,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._dependencies = dependencies
        self._seconds = seconds
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
        scan, fingerprints, failures = await asyncio.to_thread(self._scan_repository)
        warnings = [*scan.warnings, *failures]
        if warnings != self._warnings:
            self._warnings = warnings
            for text in warnings:
                _log.error("%s", text)
        order = self._dependencies.create_load_order(polled=True)
        current = self._dependencies.lifecycle.is_current
        for name, directory in scan.models.items():
            if directory.duplicated:
                self._dependencies.unload(name)
            elif name not in fingerprints or name in self._loading:
                continue
            elif not current(name, fingerprints[name]):
                self._start_load(name, order)
        if not scan.failures:  # otherwise a model may lie in a folder that cannot be read
            for name in self._registry.names() - scan.models.keys():
                self._dependencies.remove_model(name)

    def _scan_repository(self) -> tuple[RepositoryScan, dict[str, Fingerprint], list[str]]:
        """Scans once; returns also the fingerprints, and errors of models without one. Blocks.

        A model whose directory cannot be read stays as it is.
        """
        scan = self._repository.scan()
        fingerprints: dict[str, Fingerprint] = {}
        failures: list[str] = []
        for name, directory in scan.models.items():
            if directory.duplicated:
                continue
            try:
                fingerprints[name] = compute_fingerprint(directory.path)
            except HostError as error:
                failures.append(f"failed to poll model '{name}': {error.message}")
        return scan, fingerprints, failures

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

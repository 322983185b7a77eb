"""Following the repositories: what is new, changed or gone on disk becomes so in the server."""

from __future__ import annotations

import asyncio
import logging

from host.model_control.dependencies import EnsembleDependencies, LoadOrder
from host.models.registry import Registry
from host.repository.repository import Fingerprint, Repository, RepositoryScan, compute_fingerprint

_log = logging.getLogger("pbhost")


class RepositoryPoller:
    """Looks every `seconds`, off the event loop (configuration spec 8.5)."""

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        families: EnsembleDependencies,
        seconds: float,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._families = families
        self._seconds = seconds
        self._complaints: list[str] = []
        self._loading: dict[str, asyncio.Task[bool]] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._poll()
            except Exception:  # whatever is wrong with one look at the disk, more follow
                _log.exception("a poll of the model repositories failed")
            await asyncio.sleep(self._seconds)

    async def _poll(self) -> None:
        """Begin what one look at the repositories asks for. A model still loading is left alone."""
        scan, stamps = await asyncio.to_thread(self._scan_repository)
        if scan.warnings != self._complaints:
            self._complaints = scan.warnings
            for text in scan.warnings:
                _log.error("%s", text)
        order = self._families.create_load_order(polled=True)
        current = self._families.lifecycle.is_current
        for name, directory in scan.models.items():
            if directory.duplicated:
                self._families.unload(name)
            elif name not in self._loading and not current(name, stamps[name]):
                self._start_load(name, order)
        if not scan.failures:  # else what is missing may still be there, in what cannot be read
            for name in self._registry.names() - scan.models.keys():
                self._families.remove_model(name)

    def _scan_repository(self) -> tuple[RepositoryScan, dict[str, Fingerprint]]:
        scan = self._repository.scan()
        return scan, {
            name: compute_fingerprint(directory.path)
            for name, directory in scan.models.items()
            if not directory.duplicated
        }

    def _start_load(self, name: str, order: LoadOrder) -> None:
        loading = asyncio.get_running_loop().create_task(order.try_load(name))
        self._loading[name] = loading
        loading.add_done_callback(lambda _: self._loading.pop(name))

    async def close(self) -> None:
        """Look no more."""
        tasks = [self._task, *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

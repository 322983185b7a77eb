"""Loads the models of the start, and reports the progress of their loads."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from host.errors import internal
from host.instances.launchers import has_terminal
from host.logs.formats import format_table
from host.logs.log_handler import LogHandler
from host.model_control.dependencies import EnsembleDependencies
from host.model_control.repository_poller import RepositoryPoller, read_state
from host.models.registry import Registry, VersionState
from host.options.options import Options
from host.repository.fingerprint import Fingerprint, FingerprintFunction
from host.repository.repository import Repository

_REFRESH_SECONDS = 0.2


class LoadProgress:
    """While entered, repaints `loaded 3/20, loading: a, b`; silent if stderr is no terminal.

    Lines of `log` overwrite it.
    """

    def __init__(
        self, registry: Registry, repository: Repository, names: Sequence[str], log: LogHandler
    ) -> None:
        self._log = log
        self._repository = repository
        self._registry = registry
        self._names = names
        self._shown = sys.stderr.isatty()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoadProgress:
        if self._shown:
            self._refresh()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._log.show_progress("")

    def _refresh(self) -> None:
        states = {
            name: [version.state for version in self._registry.versions(name).values()]
            for name in self._names
        }
        loading = [
            " ".join(filter(None, (name, self._repository.describe_fetch(name))))
            for name, known in states.items()
            if VersionState.LOADING in known
        ]
        loaded = sum(VersionState.READY in known for known in states.values())
        text = f"loaded {loaded}/{len(self._names)}, loading: {', '.join(loading)}"
        self._log.show_progress(text[: shutil.get_terminal_size().columns - 1])
        self._timer = asyncio.get_running_loop().call_later(_REFRESH_SECONDS, self._refresh)


_log = logging.getLogger("pbhost")


class StartupModels:
    """Loads the models of the start, once.

    `fingerprint`: tells whether files of a model have changed. `log`: shows the progress at a
    terminal.
    """

    def __init__(
        self,
        options: Options,
        registry: Registry,
        repository: Repository,
        dependencies: EnsembleDependencies,
        fingerprint: FingerprintFunction,
        log: LogHandler,
    ) -> None:
        self._options = options
        self._registry = registry
        self._repository = repository
        self._dependencies = dependencies
        self._fingerprint = fingerprint
        self._log = log

    async def load_models(self) -> RepositoryPoller | None:
        """Loads them, and returns what follows their files from then on; None if nothing does.

        Raises HostError if one fails and `exit_on_error` is set.
        """
        options = self._options
        with self._repository.keep_listing():
            started_with = await self._load_listed()
        if not options.poll_interval:
            return None
        return RepositoryPoller(
            self._registry,
            self._repository,
            self._dependencies,
            options.poll_interval,
            self._fingerprint,
            started_with,
        )

    async def _load_listed(self) -> Mapping[str, Fingerprint] | None:
        """Loads them; returns the fingerprints before that, if the poller needs them."""
        options = self._options
        started_with = None
        if self._repository.mirrors:
            planner = self._dependencies.lifecycle.planner
            self._registry.on_demand |= await asyncio.to_thread(planner.find_models_on_demand)
        if options.dev:
            state = await asyncio.to_thread(read_state, self._repository, self._fingerprint)
            started_with = state.fingerprints
        names, all_loaded = await self._list_names()
        if options.debug_model:
            _warn_about_debugging(options.debug_model, names)
        # A repainted line would overwrite the prompt of a debugger.
        quiet = bool(options.debug_model) or options.dev
        with (
            nullcontext()
            if quiet
            else LoadProgress(self._registry, self._repository, names, self._log)
        ):
            all_loaded = await self._dependencies.load_all(names) and all_loaded
        _log.info("%s", format_model_table(self._registry), extra={"table": True})
        if not all_loaded:
            error = internal("failed to load all models")
            if options.exit_on_error:
                raise error
            _log.error("%s", error.status_string)
        return started_with

    async def _list_names(self) -> tuple[list[str], bool]:
        """The models to load at start-up, and whether every repository could be read."""
        options, repository = self._options, self._repository
        mode = options.model_control_mode
        load_all = "*" in options.load_model
        named: list[str] = []
        if mode in ("explicit", "on-demand") and not load_all:
            asked = list(dict.fromkeys(options.load_model))
            known = await asyncio.to_thread(lambda: list(map(repository.qualified_names, asked)))
            named = [
                one for name, found in zip(asked, known, strict=True) for one in found or [name]
            ]
            if mode == "explicit":
                return named, True
        scan = await asyncio.to_thread(repository.scan)
        for text in scan.warnings:
            _log.error("%s", text)
        if options.model_repository and not (scan.models or scan.failures):
            paths = ", ".join(f"'{path}'" for path in options.model_repository)
            _log.warning("no models in %s: a model is a folder there, as NAME/1/model.py", paths)
        names = [
            name
            for name, directory in scan.models.items()
            if not directory.duplicated and (load_all or name not in self._registry.on_demand)
        ]
        return list(dict.fromkeys([*named, *names])), not scan.failures


def format_model_table(registry: Registry) -> str:
    """A table of every known version, with READY or the reason why it is not."""
    rows: list[list[str]] = []
    for name, failure in registry.failures.items():
        rows.append([name, "-", f"Not loaded: {failure.reason}"])
    for name, entry in registry.list_entries():
        if not entry.versions:
            rows.append([name, "-", f"Not loaded: {entry.reason}"])
        for number, version in sorted(entry.versions.items()):
            status = version.state.value
            if version.state is not VersionState.READY and version.reason:
                # The log has all lines of the reason.
                status += f": {version.reason.splitlines()[0]}"
            rows.append([name, str(number), status])
    rows.sort(key=lambda row: row[0])
    return format_table(["Model", "Version", "Status"], rows)


def _warn_about_debugging(model: str, names: Sequence[str]) -> None:
    if not has_terminal():
        _log.warning(
            "--debug-model: stdin is not a terminal, so a debugger in '%s' gets no input and quits;"
            " start pbhost at a terminal (in a container: docker run -it)",
            model,
        )
    if model not in names:
        _log.warning("--debug-model: model '%s' is not loaded at start-up", model)

"""How models come and go: loading, replacing, unloading, and what the registry then says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from host.config import model_config as configuration
from host.config.names import checked_load_name
from host.errors import HostError, internal, invalid_argument, unavailable
from host.inference import Parameter
from host.models.loader import Loader
from host.models.python_model import PythonModel
from host.models.registry import UNLOADED, Registry, State, Version
from host.repository import (
    ModelDirectory,
    Repository,
    Stamp,
    model_file,
    select_versions,
    stamp,
    versions,
)

_log = logging.getLogger("pbhost")


class Lifecycle:
    """The only one that changes the registry.

    `strict`: configurations must be complete. `explicit`: clients may load and unload.
    `grace` and `finalize`: seconds for a stuck batch and for `finalize` at unload.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        loader: Loader,
        *,
        strict: bool,
        explicit: bool,
        threads: int,
        grace: float,
        finalize: float,
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._loader = loader
        self._strict = strict
        self._explicit = explicit
        self._slots = asyncio.Semaphore(threads)
        self._grace = grace
        self._finalize = finalize
        self._locks: dict[str, asyncio.Lock] = {}
        self._stamps: dict[str, tuple[Stamp, str | None]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._living: set[PythonModel] = set()

    def names_on_disk(self) -> list[str]:
        """Every model directory there is now, by name."""
        return list(self._repository.scan().models)

    async def load_all(self, names: Iterable[str] | None = None) -> bool:
        """Load these models, or all on disk; whether all are ready. Failures are in the log."""
        wanted = list(self.names_on_disk() if names is None else names)
        results = await asyncio.gather(*map(self._load_quietly, wanted))
        return all(results)

    async def _load_quietly(self, name: str) -> bool:
        try:
            await self.load(name)
        except HostError as error:
            if not self._registry.versions(name):  # else each version has been reported
                self._registry.set_failed(name, error.status_string)
                _log.error("failed to load '%s': %s", name, error.status_string)
            return False
        return True

    async def load_explicit(self, name: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        """Load at a client's request. Raises HostError (configuration spec 8.6)."""
        self._refuse_unless_explicit()
        name = checked_load_name(name)
        override = _override(parameters)
        poll_failure = f"failed to load '{name}', failed to poll from model repository"
        try:
            directory = await asyncio.to_thread(self._repository.find, name)
            await asyncio.to_thread(self._read, directory, override)
        except HostError as error:
            _log.error("%s: %s", poll_failure, error.message)
            raise internal(f"{poll_failure}: {error.message}") from error
        # A client that goes away does not stop a load half-way.
        loading = asyncio.get_running_loop().create_task(self.load(name, override))
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(loading)
        except HostError as error:
            raise invalid_argument(f"load failed for model '{name}': {error.message}\n") from error

    async def load(self, name: str, override: str | None = None) -> None:
        """Load a model, or bring it up to date. What served before serves until then.

        Raises HostError.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            directory = await asyncio.to_thread(self._repository.find, name)
            seen = (await asyncio.to_thread(stamp, directory.path), override)
            if seen == self._stamps.get(name) and self._is_ready(name):
                return
            loaded = await asyncio.to_thread(self._read, directory, override)
            available = await asyncio.to_thread(versions, directory.path)
            chosen = select_versions(loaded.config, available)
            for number in chosen:
                model_file(directory.path, number, loaded.config)
            self._registry.clear_failed(name)
            await self._replace(name, directory.path, loaded, chosen)
            self._stamps[name] = seen
            _log.info("successfully loaded '%s'", name)

    def _read(self, directory: ModelDirectory, override: str | None) -> configuration.LoadedConfig:
        return configuration.load(directory.path, strict=self._strict, override=override)

    def _is_ready(self, name: str) -> bool:
        """Whether the model can be asked; one whose instances were given up cannot."""
        return any(
            version.state is State.READY and version.model is not None and version.model.ready
            for version in self._registry.versions(name).values()
        )

    async def _replace(
        self, name: str, path: Path, loaded: configuration.LoadedConfig, chosen: list[int]
    ) -> None:
        """Load the chosen versions; all of them take over, or none."""
        before = self._registry.versions(name)
        serving = {number for number, v in before.items() if v.state is State.READY}
        for number in chosen:
            _log.info("loading: %s:%d", name, number)
            if number not in serving:
                self._registry.set(name, Version(number, State.LOADING))
        results = await asyncio.gather(
            *(self._load_version(path, number, loaded) for number in chosen),
            return_exceptions=True,
        )
        failures = {
            number: result
            for number, result in zip(chosen, results, strict=True)
            if isinstance(result, BaseException)
        }
        if failures:
            await self._undo(name, serving, chosen, results, failures)
            return
        for number, result in zip(chosen, results, strict=True):
            assert isinstance(result, PythonModel)
            self._living.add(result)
            self._registry.set(name, Version(number, State.READY, model=result))
        for number, version in before.items():
            if number in serving:
                self._release(name, version, replaced=number in chosen)
            elif number not in chosen:
                self._registry.remove(name, number)  # its failure is of the past

    async def _load_version(
        self, path: Path, number: int, loaded: configuration.LoadedConfig
    ) -> PythonModel:
        async with self._slots:
            return await self._loader.load(path, number, loaded)

    async def _undo(
        self,
        name: str,
        serving: set[int],
        chosen: list[int],
        results: list[PythonModel | BaseException],
        failures: dict[int, BaseException],
    ) -> None:
        """A version failed: give up those that came up with it, and say why. Always raises."""
        texts: list[str] = []
        for number, result in zip(chosen, results, strict=True):
            if isinstance(result, PythonModel):
                await result.stop(0, self._finalize)
                state, reason = State.UNAVAILABLE, UNLOADED
            else:
                error = result if isinstance(result, HostError) else internal(repr(result))
                if error is not result:
                    _log.error("unexpected failure of a load", exc_info=result)
                state, reason = State.UNAVAILABLE, error.status_string
                texts.append(f"version {number} is at {state.value} state: {reason};")
                _log.error("failed to load '%s' version %d: %s", name, number, reason)
            if number not in serving:
                self._registry.set(name, Version(number, state, reason))
        raise invalid_argument("".join(texts))

    async def unload_explicit(self, name: str) -> None:
        """Begin to unload at a client's request. Raises HostError."""
        self._refuse_unless_explicit()
        if not self._registry.versions(name):
            return  # nothing to unload is success (configuration spec 8.7)
        async with self._locks.setdefault(name, asyncio.Lock()):
            self._stamps.pop(name, None)
            for version in self._registry.versions(name).values():
                if version.state is State.READY:
                    self._release(name, version)

    def _release(self, name: str, version: Version, replaced: bool = False) -> None:
        """Let a version finish its work and go. A replaced one is no longer in the registry."""
        if not replaced:
            version.state = State.UNLOADING
            self._registry.changed()
        task = asyncio.get_running_loop().create_task(self._finish(name, version, replaced))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _finish(self, name: str, version: Version, replaced: bool) -> None:
        model = version.model
        assert isinstance(model, PythonModel)
        await model.drain()
        await model.stop(self._grace, self._finalize)
        self._living.discard(model)
        version.model = None
        if not replaced:
            version.state, version.reason = State.UNAVAILABLE, UNLOADED
            self._registry.changed()
        _log.info("successfully unloaded '%s' version %d", name, version.number)

    def models(self) -> list[PythonModel]:
        """Every model that is alive, also those that only finish their work."""
        return list(self._living)

    def abort_all(self, error: HostError) -> None:
        """Stop waiting for what still runs: its callers get this error."""
        self._grace = 0.0
        for model in self.models():
            model.abort(error)

    async def unload_all(self) -> None:
        """Unload everything and wait until it is gone; loads under way are given up."""
        for loading in self._loads:
            loading.cancel()
        if self._loads:
            await asyncio.wait(self._loads)
        for name, entry in self._registry.items():
            for version in entry.versions.values():
                if version.state is State.READY:
                    self._release(name, version)
        if self._releases:
            await asyncio.wait(self._releases)

    def _refuse_unless_explicit(self) -> None:
        if not self._explicit:
            raise unavailable("explicit model load / unload is not allowed if polling is enabled")


def _override(parameters: Mapping[str, Parameter | bytes]) -> str | None:
    """The `config` parameter of a load. Raises HostError for any other parameter."""
    for key, value in parameters.items():
        if key != "config":
            raise invalid_argument(
                f"Unrecognized load parameter '{key}' with type"
                f" '{type(value).__name__}', expected 'config' (files cannot be sent yet)"
            )
        if not isinstance(value, str):
            raise invalid_argument("Config parameter 'config' must have string type for its value")
    config = parameters.get("config")
    return config if isinstance(config, str) else None

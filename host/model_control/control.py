"""Model control: what clients and models may ask about loading (configuration spec 8.5 to 8.7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakValueDictionary

from host.config.names import checked_load_name
from host.errors import HostError, internal, invalid_argument, unavailable
from host.inference.metadata import IndexEntry
from host.inference.request import Parameter
from host.logs.formats import model_fields
from host.model_control.dependencies import EnsembleDependencies
from host.models.loading import RepositoryReadError
from host.models.registry import Registry, VersionState, parse_version
from host.repository.override import Override, parse_override
from host.repository.repository import Repository

_log = logging.getLogger("pbhost")

_DUPLICATED = "model appears in two or more repositories"


class ModelControl:
    """What doors ask, and fulfils the `ModelControl` that models ask.

    `explicit`: loads and unloads may be asked for. `serving`: whether the server takes requests.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        families: EnsembleDependencies,
        *,
        explicit: bool,
        serving: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._families = families
        self._explicit = explicit
        self._serving = serving
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, name: str, config: str, files: dict[str, bytes], asker: str = "") -> None:
        """As `load_with`, with what `pb_utils.load_model` was given; `files` are by their paths."""
        parameters: dict[str, Parameter | bytes] = {
            f"file:{path}": content for path, content in files.items()
        }
        if config:
            parameters["config"] = config
        await self.load_with_parameters(name, parameters, asker)

    async def load_in_turn(self, name: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        """As `load_with`, after the unloads of the model that were asked for before."""
        async with self._wait_for_earlier(name):
            pass
        await self.load_with_parameters(name, parameters)

    async def load_with_parameters(
        self, name: str, parameters: Mapping[str, Parameter | bytes], asker: str = ""
    ) -> None:
        """Load or reload a model with overrides (`config`, `file:<path>`); wait until it serves.

        `asker`: the model whose `initialize` waits for this. Raises HostError with the texts of
        protocol spec 1.5; what they leave out is in the log.
        """
        self._refuse_unless_explicit()
        name = checked_load_name(name)
        not_polled = f"failed to load '{name}', failed to poll from model repository"
        try:
            override = parse_override(parameters)
        except HostError as error:
            _log.error(
                "failed to load '%s': %s", name, error.status_string, extra=model_fields(name)
            )
            raise internal(not_polled) from error
        try:
            known = await self._resolve_model(name, override)
            with self._waits_for_loads(asker, known):
                failures = await self._families.load(known, override)
        except HostError as error:
            failures = {name: error}
        for failure in failures.values():
            if isinstance(failure, RepositoryReadError):
                raise internal(not_polled) from failure
        if failures:
            raise invalid_argument(
                "".join(f"load failed for model '{k}': {e.message}\n" for k, e in failures.items())
            ) from next(iter(failures.values()))

    async def _resolve_model(self, name: str, override: Override | None) -> list[str]:
        """What goes by this name; what did and is gone is unloaded (configuration spec 8.9)."""
        if override is not None and override.files:
            return [name]  # it lies in no repository
        known = await asyncio.to_thread(self._repository.qualified_names, name)
        for gone in set(self._registry.qualified_names(name)) - {*known, name}:
            self._families.remove_model(gone)
        return known or [name]

    @contextmanager
    def _waits_for_loads(self, asker: str, known: Sequence[str]) -> Iterator[None]:
        """While entered, the load of whatever is called `asker` waits for those."""
        if not asker:
            yield
            return
        limiter = self._families.lifecycle.limiter
        pairs = [(one, other) for one in self._registry.qualified_names(asker) for other in known]
        with ExitStack() as stack:
            for index, pair in enumerate(pairs):
                # It has given its one place once.
                stack.enter_context(
                    limiter.lend_slot(*pair) if not index else limiter.waits_for(*pair)
                )
            yield

    async def unload_in_turn(self, name: str, dependents: bool) -> None:
        """As `unload`, after the loads under way that have to do with the model."""
        self._refuse_unless_explicit()

        async def unload() -> None:
            async with self._wait_for_earlier(name):
                for known in self._registry.qualified_names(name):
                    await self._families.unload_in_turn(known, dependents)

        # Whoever asked may go away; that changes nothing.
        await asyncio.shield(asyncio.get_running_loop().create_task(unload()))

    def _wait_for_earlier(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def unload(self, name: str, dependents: bool) -> None:
        """Begin to unload a model; one that is not loaded is no error. Raises HostError.

        Ensembles that are made of it go as well. `dependents`: and so do models that were loaded
        only because this one is made of them, if no other ensemble is. A load that is under way
        fails: it may be that of the model that asks, which could not wait for it.
        """
        self._refuse_unless_explicit()
        for known in self._registry.qualified_names(name):
            self._families.unload(known, dependents)

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether a model can be asked. Raises HostError if it is not there (pb_utils 3.14)."""
        self._refuse_unless_serving()
        model = self._registry.find(name, _version(version))
        reason = await model.why_not_ready()
        if reason:
            number = model.version
            _log.debug(
                "Model '%s' version %d is not ready: %s",
                name, number, reason, extra=model_fields(name, number),
            )  # fmt: skip
        return not reason

    async def index(self, ready: bool) -> list[IndexEntry]:
        """Every model on disk with its versions, or only the ready ones. Raises HostError."""
        self._refuse_unless_serving()
        scan = await asyncio.to_thread(self._repository.scan)
        entries: list[IndexEntry] = []
        for known, directory in scan.models.items():
            name = directory.name
            if directory.duplicated:
                entries.append(IndexEntry(name, "", VersionState.UNAVAILABLE.value, _DUPLICATED))
                continue
            versions = self._registry.versions(known)
            if not self._registry.has_versions(known) and not ready:
                entries.append(IndexEntry(name))
            entries += [
                IndexEntry(name, str(v.number), v.state.value, v.reason)
                for v in versions.values()
                if not ready or v.state is VersionState.READY
            ]
        return entries

    def _refuse_unless_explicit(self) -> None:
        self._refuse_unless_serving()
        if not self._explicit:
            raise unavailable("explicit model load / unload is not allowed if polling is enabled")

    def _refuse_unless_serving(self) -> None:
        if not self._serving():
            raise unavailable("Server not ready")


def _version(text: str) -> int:
    """A version as models write it; they are told of a negative one in other words than clients."""
    try:
        return parse_version(text)
    except HostError as error:
        if "details" in error.message:
            raise
        raise invalid_argument(
            f"failed to get model version from specified version string '{text}', version should"
            " be an integral value > 0"
        ) from error

"""Model control: loads and unloads models on request, and tells what has changed.

Source: docs/reference/model-control.md, "Control modes" to "Unload requests".
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from host.config.model_config import checked_load_name
from host.errors import HostError, internal, invalid_argument, unavailable
from host.health import ask_if_ready
from host.inference.metadata import IndexEntry
from host.inference.request import Parameter
from host.logs.formats import model_fields
from host.model_control.dependencies import EnsembleDependencies
from host.model_control.load_planner import LoadRequest
from host.models.loaders import RepositoryReadError
from host.models.registry import UNLOADED, Registry, VersionState, parse_version
from host.models.traffic_splits import TrafficChange, TrafficSplits
from host.remote_models import RemoteModels
from host.repository.override import Override, parse_override
from host.repository.repository import Repository
from pb_utils import _model_texts as texts

LoadParameters = Mapping[str, Parameter | bytes]
"""The parameters of a load: `config`, and contents of files by `file:<path>`."""


class ModelControlHook(Protocol):
    """Is called instead of the loads and unloads that clients and models ask for.

    It decides whether and when this server does what was asked, and can pass it on to other
    servers. What it raises as HostError is the answer. Loads at the start, on demand, by the poller
    and by `Server.load_model` do not go through it; nor does a model of this server that another
    loads in `initialize`, as each server with the other one loads it.

    For the server that asks, only `load_here` and `unload_here` will do: `Server.load_model` waits
    for a place among the loads in progress, and for other loads of the same model.
    """

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Loads or reloads a model. `load_here` does it in this server; it raises HostError."""

    async def unload(
        self, name: str, unload_dependents: bool, unload_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Unloads a model. `unload_here` does it in this server; it raises HostError."""


class ModelHolds:
    """Counts the holds on each model by their holders, which are objects that stand for instances.

    Source: docs/reference/model-module.md, "Model control". Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[object]] = {}
        self._loaded_by_hold: set[str] = set()

    def add(self, name: str, holder: object, loads: bool) -> None:
        """Adds a hold; `loads`: the model was not loaded before."""
        if name not in self._counts:
            self._counts[name] = Counter()
            if loads:
                self._loaded_by_hold.add(name)
        self._counts[name][holder] += 1

    def keep_loaded(self, name: str) -> None:
        """Called when the model is loaded without a hold: it stays loaded when the holds end."""
        self._loaded_by_hold.discard(name)

    def release(self, name: str, holder: object) -> None:
        """Removes one hold, if there is one."""
        counts = self._counts.get(name)
        if counts is not None and holder in counts:
            counts[holder] -= 1
            if not counts[holder]:
                self._remove(name, holder)

    def release_all(self, holder: object) -> list[str]:
        """Removes all holds of an instance that has ended.

        Returns the models that were loaded by a hold and have none any more.
        """
        released = []
        for name in [name for name, counts in self._counts.items() if holder in counts]:
            loaded_by_hold = name in self._loaded_by_hold
            self._remove(name, holder)
            if loaded_by_hold and name not in self._counts:
                released.append(name)
        return released

    def are_held(self, names: Iterable[str]) -> bool:
        """Whether any of these models is held."""
        return any(name in self._counts for name in names)

    def _remove(self, name: str, holder: object) -> None:
        del self._counts[name][holder]
        if not self._counts[name]:
            del self._counts[name]
            self._loaded_by_hold.discard(name)


_log = logging.getLogger("pbhost")

_DUPLICATED = "model appears in two or more repositories"


class ModelControl:
    """Model control for the frontends, and the `ModelControl` protocol that instances use.

    `explicit`: clients may load and unload. `on_demand`: the index gives models that were never
    loaded the state of unloaded ones. `serving`: whether the server accepts requests.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        dependencies: EnsembleDependencies,
        traffic: TrafficSplits,
        *,
        explicit: bool,
        on_demand: bool,
        serving: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._dependencies = dependencies
        self._traffic = traffic
        self._explicit = explicit
        self._on_demand = on_demand
        self._serving = serving
        self.hook: ModelControlHook | None = None
        """Takes part in loads and unloads; None if nothing does."""
        self.remote: RemoteModels | None = None
        """The models of other servers; None if there are none."""
        self._holds = ModelHolds()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load_for_model(
        self,
        name: str,
        config: str,
        files: dict[str, bytes],
        requester: str = "",
        holder: object = None,
    ) -> None:
        """Loads a model for `pb_utils.load_model`; `files`: contents by path. See `load_model`.

        `holder`: the instance that holds the model from now on; None if it does not. The hook takes
        no part in the load of a model of this server by the `initialize` of another: each server
        that loads the other does it.
        """
        parameters: dict[str, Parameter | bytes] = {
            f"file:{path}": content for path, content in files.items()
        }
        if config:
            parameters["config"] = config
        hooked = not requester or self._is_remote(name)
        if holder is None:
            self._holds.keep_loaded(name)
            await self.load_model(name, parameters, requester=requester, hooked=hooked)
            return
        name = checked_load_name(name)
        # Held before it is loaded: until then, another model could unload it.
        self._holds.add(name, holder, loads=not self._is_loaded(name))
        try:
            await self.load_model(name, parameters, requester=requester, hooked=hooked)
        except BaseException:  # also of a call that was cancelled
            self._holds.release(name, holder)
            raise

    async def load_model(
        self,
        name: str,
        parameters: LoadParameters,
        *,
        requester: str | None = None,
        hooked: bool = True,
    ) -> None:
        """Loads or reloads a model, with overrides (`config`, `file:<path>`) if there are any.

        Returns when the model serves. A load by a client, of which `requester` is None, waits for
        earlier unloads of the model, and for the ends of the instances that it takes away. A load
        by a model waits for neither, as one of these may wait for the load; `requester` is the
        model whose `initialize` waits for it, "" if none does. `hooked`: the hook takes part.

        Raises HostError with the texts of docs/reference/http.md, "Model repository"; the log has
        the details that these leave out.
        """
        if hooked and self.hook is not None:
            self._raise_unless_explicit()
            load_here = partial(
                self.load_model, name, parameters, requester=requester, hooked=False
            )
            await self.hook.load(name, parameters, load_here)
            return
        if requester is None:
            async with self._wait_for_earlier(name):
                pass
            self._holds.keep_loaded(name)
        self._raise_unless_explicit()
        self._raise_if_remote(name)
        name = checked_load_name(name)
        override = _read_override(name, parameters)
        try:
            known = await self._resolve_model(name, override)
            with self._waits_for_loads(requester, known):
                failures = await self._dependencies.start_load(known, LoadRequest(override))
        except HostError as error:
            known, failures = [], {name: error}
        _raise_failures(name, failures)
        if override is not None:
            for one in known:
                self._traffic.follow_configuration(one)
        if requester is None:
            await self._dependencies.wait_surplus_ended(self._registry.qualified_names(name))

    async def _resolve_model(self, name: str, override: Override | None) -> list[str]:
        """The qualified names of all models of this name; unloads those that are gone from disk.

        Source: docs/reference/model-control.md, "Namespaces".
        """
        if override is not None and override.files:
            return [name]  # its files are in no repository
        if self._repository.namespaces:
            await self._repository.refresh()
        known = await asyncio.to_thread(self._repository.qualified_names, name)
        for gone in set(self._registry.qualified_names(name)) - {*known, name}:
            self._dependencies.remove_model(gone)
        return known or [name]

    @contextmanager
    def _waits_for_loads(self, requester: str | None, known: Sequence[str]) -> Iterator[None]:
        """While entered, the load of the model `requester` waits for the loads of `known`."""
        if not requester:
            yield
            return
        limiter = self._dependencies.lifecycle.limiter
        pairs = [
            (one, other) for one in self._registry.qualified_names(requester) for other in known
        ]
        with ExitStack() as stack:
            stack.enter_context(self._dependencies.lifecycle.initializing.lend())
            for index, pair in enumerate(pairs):
                # The load has one slot, which it gives back once.
                stack.enter_context(
                    limiter.lend_slot(*pair) if not index else limiter.waits_for(*pair)
                )
            yield

    async def unload_model(self, name: str, dependents: bool, *, hooked: bool = True) -> None:
        """Waits for the loads in progress that concern the model, then as `unload_for_model`.

        For clients. `hooked`: the hook takes part.
        """
        self._raise_unless_explicit()
        if hooked and self.hook is not None:
            unload_here = partial(self.unload_model, name, dependents, hooked=False)
            await self.hook.unload(name, dependents, unload_here)
            return
        self._raise_if_remote(name)

        async def unload() -> None:
            async with self._wait_for_earlier(name):
                for known in self._registry.qualified_names(name):
                    await self._dependencies.unload_in_turn(known, dependents)

        # The unload continues if its caller is cancelled.
        await asyncio.shield(asyncio.get_running_loop().create_task(unload()))

    def change_traffic(self, name: str, change: TrafficChange) -> None:
        """Changes how the requests to a model are split between versions. Raises HostError."""
        self._raise_unless_serving()
        if not self._explicit:
            raise unavailable(
                f"the shares of model '{name}' can be changed only with"
                " --model-control-mode=explicit or on-demand"
            )
        self._traffic.change(name, change)

    def _wait_for_earlier(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def unload_for_model(self, name: str, dependents: bool, holder: object = None) -> None:
        """Starts to unload a model and the ensembles that use it. Raises HostError.

        Releases a hold of `holder`, the instance that asks. As long as the model or one of these
        ensembles is held, they stay loaded. A model that is not loaded is no error. `dependents`:
        also unloads the step models that were loaded only for this ensemble and that no other
        ensemble uses. A load in progress fails: it may belong to the model that asks, which
        therefore cannot wait for it.
        """
        self._raise_unless_explicit()
        self._holds.release(name, holder)
        if self._holds.are_held(self._with_ensembles(name)):
            _log.debug("'%s' stays loaded, as models hold it", name, extra=model_fields(name))
            return
        if self.hook is None:
            self._unload_here(name, dependents)
            return

        async def unload() -> None:
            self._unload_here(name, dependents)

        await self.hook.unload(name, dependents, unload)

    def release_holds(self, holder: object) -> None:
        """Releases the holds of an instance that has ended; unloads what only they had loaded.

        With a hook, these models stay loaded: other servers may hold them.
        """
        for name in self._holds.release_all(holder):
            ends_here = self.hook is None and self._serving()
            if ends_here and not self._holds.are_held(self._with_ensembles(name)):
                self._unload_here(name, dependents=False)

    def _unload_here(self, name: str, dependents: bool) -> None:
        self._raise_if_remote(name)
        for known in self._registry.qualified_names(name):
            self._dependencies.unload(known, dependents)

    def _with_ensembles(self, name: str) -> list[str]:
        """The names of a model and of the ensembles that use it, directly or not."""
        known = self._registry.qualified_names(name)
        for one in known:  # grows meanwhile
            known += [
                user for user in self._dependencies.graph.dependents_of(one) if user not in known
            ]
        return [name, *map(self._registry.name_of, known)]

    def _is_loaded(self, name: str) -> bool:
        """Whether a version of the model is ready or is being loaded."""
        return any(
            version.state in (VersionState.READY, VersionState.LOADING)
            for known in self._registry.qualified_names(name)
            for version in self._registry.versions(known).values()
        )

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready. Raises HostError if there is no such model.

        Source: docs/reference/model-module.md, "Model control".
        """
        self._raise_unless_serving()
        if self.remote is not None:
            await self.remote.refresh(name)
        return await ask_if_ready(self._registry.find(name, _version(version)))

    async def index(self, ready: bool) -> list[IndexEntry]:
        """The models on disk with their versions, or only the ready ones. Raises HostError."""
        self._raise_unless_serving()
        await self._repository.refresh_soon()
        scan = await asyncio.to_thread(self._repository.scan)
        entries: list[IndexEntry] = []
        for known, directory in scan.models.items():
            name = directory.name
            if directory.duplicated:
                entries.append(IndexEntry(name, "", VersionState.UNAVAILABLE.value, _DUPLICATED))
                continue
            versions = self._registry.versions(known)
            if not self._registry.has_versions(known) and not ready:
                entries.append(
                    IndexEntry(name, "", VersionState.UNAVAILABLE.value, UNLOADED)
                    if self._on_demand
                    else IndexEntry(name)
                )
            entries += [
                IndexEntry(name, str(v.number), v.state.value, v.reason)
                for v in versions.values()
                if not ready or v.state is VersionState.READY
            ]
        return entries

    def _raise_unless_explicit(self) -> None:
        self._raise_unless_serving()
        if not self._explicit:
            raise unavailable("explicit model load / unload is not allowed if polling is enabled")

    def override_config(self, name: str) -> str:
        """The configuration in force that came with a load, in JSON; "" for that of the files."""
        lifecycle = self._dependencies.lifecycle
        configs = map(lifecycle.override_config, self._registry.qualified_names(name))
        return next(filter(None, configs), "")

    def _is_remote(self, name: str) -> bool:
        return self.remote is not None and self.remote.serves(name)

    def _raise_if_remote(self, name: str) -> None:
        if self._is_remote(name):
            raise unavailable(f"model '{name}' belongs to another server: load and unload it there")

    def _raise_unless_serving(self) -> None:
        if not self._serving():
            raise unavailable("Server not ready")


def _read_override(name: str, parameters: LoadParameters) -> Override | None:
    """The override of a load, if it has one. Raises HostError; the log has the details."""
    try:
        return parse_override(parameters)
    except HostError as error:
        _log.error("failed to load '%s': %s", name, error.status_string, extra=model_fields(name))
        raise internal(texts.failed_load(name)) from error


def _raise_failures(name: str, failures: Mapping[str, HostError]) -> None:
    """Raises the HostError of a load of models of this name, some of which have failed."""
    for failure in failures.values():
        if isinstance(failure, RepositoryReadError):
            raise internal(texts.failed_load(name)) from failure
    if failures:
        raise invalid_argument(
            "".join(f"load failed for model '{k}': {e.message}\n" for k, e in failures.items())
        ) from next(iter(failures.values()))


def _version(text: str) -> int:
    """Parses a version for `pb_utils.is_model_ready`, which has error texts of its own."""
    try:
        return parse_version(text)
    except HostError as error:
        if "details" in error.message:
            raise
        raise invalid_argument(texts.invalid_version(text)) from error

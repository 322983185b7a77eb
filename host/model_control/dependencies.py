"""Loads and unloads models together with the ensembles that are made of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from host.config.model_config import ModelConfig
from host.errors import HostError
from host.model_control.dependency_graph import DependencyGraph, circular_dependency_error
from host.model_control.lifecycle import ModelLifecycle
from host.models.loading import RepositoryReadError
from host.models.registry import Registry
from host.repository.override import Override

_log = logging.getLogger("pbhost")


class EnsembleDependencies:
    """Members come before their ensembles. When one changes, its ensembles are loaded anew; when
    one goes, they go, and come back with it (configuration spec 8.3, 8.6, 8.7).

    Belongs to the event loop.
    """

    def __init__(self, registry: Registry, lifecycle: ModelLifecycle) -> None:
        self.lifecycle = lifecycle
        self._known = DependencyGraph(registry)
        self._under_way: dict[asyncio.Task[bool], LoadOrder] = {}

    def create_load_order(self, polled: bool = False) -> LoadOrder:
        """Loads that are asked for together. `polled`: nobody has asked for them."""
        return LoadOrder(
            self.lifecycle, self._known, self._unload_incomplete_ensemble, self._under_way, polled
        )

    async def load_all(self, names: Iterable[str]) -> bool:
        """Load these models; whether all are ready. Failures are in the log and the registry."""
        return all(await asyncio.gather(*map(self.create_load_order().try_load, names)))

    async def load(
        self, names: Sequence[str], override: Override | None = None
    ) -> dict[str, HostError]:
        """Load models, and before what they are made of; then what is made of them.

        As `Lifecycle.load` otherwise; what went wrong with each.
        """
        order = self.create_load_order()
        loads = (order.load(name, override) for name in names)
        results = zip(names, await asyncio.gather(*loads, return_exceptions=True), strict=True)
        failures: dict[str, HostError] = {}
        for name, result in results:
            if isinstance(result, HostError):
                failures[name] = result
            elif result is not None:
                raise result
        return failures

    async def unload_in_turn(self, name: str, dependents: bool = False) -> None:
        """As `unload`, after the loads under way that have to do with it (spec 8.6)."""
        while loads := self._loads_of(name, dependents):
            await asyncio.wait(loads)
        self.unload(name, dependents)

    def _loads_of(self, name: str, dependents: bool) -> list[asyncio.Task[bool]]:
        names = [name]
        for one in names:
            if dependents:
                names += self._known.dependencies_of(one).difference(names)
        return [task for task, order in self._under_way.items() if order.includes_any(names)]

    def unload(self, name: str, dependents: bool = False) -> None:
        """Begin to unload a model, and the ensembles that are made of it.

        With `dependents`, also what was loaded only for it, and is not needed by another one.
        """
        known = self._known
        self.lifecycle.unload(name)
        self._clear_unload_reason(name)
        self._unload_users(name)
        if dependents:
            for member in sorted(known.dependencies_of(name)):
                if member in known.implicit and not known.is_needed(member):
                    self.unload(member, dependents=True)

    def remove_model(self, name: str) -> None:
        """Unload a model that is not to be served any more; that it failed no longer counts."""
        self.lifecycle.remove_model(name)
        self._known.remove_model(name)
        self._clear_unload_reason(name)
        self._unload_users(name)

    def _clear_unload_reason(self, name: str) -> None:
        self._known.orphans.discard(name)
        self._known.implicit.discard(name)

    def _unload_incomplete_ensemble(self, name: str) -> None:
        """Unload an ensemble until its members are there, or fit, again."""
        self._known.orphans.add(name)
        self.lifecycle.unload(name, keep_override=True)
        self._unload_users(name)

    def _unload_users(self, name: str) -> None:
        for user in self._known.dependents_of(name):
            if self._known.is_served_or_loading(user):
                _log.info("unloading ensemble '%s', which is made of '%s'", user, name)
                self._unload_incomplete_ensemble(user)


class LoadOrder:
    """Loads that were asked for together: each model is brought up to date once for all of them."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        known: DependencyGraph,
        orphan: Callable[[str], None],
        under_way: dict[asyncio.Task[bool], LoadOrder],
        polled: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._known = known
        self._orphan = orphan
        self._under_way = under_way
        self._polled = polled
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._changed: set[str] = set()

    def includes_any(self, names: Iterable[str]) -> bool:
        """Whether one of these models is loaded by this order."""
        return not self._tasks.keys().isdisjoint(names)

    async def try_load(self, name: str) -> bool:
        """As `load`, for a model that is to be served; whether it is."""
        try:
            await self.load(name)
        except HostError as error:
            self._lifecycle.record_failure(name, error)
            return False
        return True

    async def load(self, name: str, override: Override | None = None) -> None:
        """Load a model, its members before, and what is made of it after. Raises HostError."""
        self._known.implicit.discard(name)
        # Whoever asked may go away; that does not stop a load half-way.
        loading = self._task(self._load(name, override))
        self._under_way[loading] = self
        loading.add_done_callback(self._under_way.pop)
        await asyncio.shield(loading)

    async def _load(self, name: str, override: Override | None) -> bool:
        changed = await self._load_once(name, self._bring_up_to_date(name, override, named=True))
        await self._reload_users()
        return changed

    async def _load_once(self, name: str, load: Coroutine[Any, Any, bool]) -> bool:
        """Whether the model has changed, once its one load in this order has ended."""
        if name in self._tasks:
            load.close()
        else:
            self._tasks[name] = self._task(load)
        return await asyncio.shield(self._tasks[name])

    def _task(self, load: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.get_running_loop().create_task(load)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _bring_up_to_date(
        self, name: str, override: Override | None = None, named: bool = False
    ) -> bool:
        """Bring one model up to date, and before that what it is made of."""
        known = self._known
        members = known.dependencies_of(name)
        fresh = False
        if members and override is None:
            found = await self._lifecycle.resolve_step_models(name, known.step_names_of(name))
            before, members = members, frozenset(found.values())
            await self._load_step_models(name, members)
            fresh = members != before or not self._changed.isdisjoint(members)
        if not named and (lasting := self._lifecycle.lasting_override(name)) is not None:
            if known.is_served_or_loading(name) and not fresh:
                return False  # no client has asked for the files on disk again
            override = lasting
        changed = await self._lifecycle.load(
            name, override, polled=self._polled, force=fresh, prepare=partial(self._prepare, name)
        )
        known.orphans.discard(name)
        if changed:
            self._changed.add(name)
        return changed

    async def _prepare(self, name: str, config: ModelConfig) -> None:
        """Before an ensemble is loaded, its members are. Raises HostError (spec 6.2)."""
        steps = config.ensemble_scheduling.step
        found = await self._lifecycle.resolve_step_models(name, {step.model_name for step in steps})
        members = self._known.record_model(name, config, found)
        if members:
            self._known.validate_ensemble(name, config, await self._load_step_models(name, members))

    async def _load_step_models(self, name: str, members: Iterable[str]) -> dict[str, HostError]:
        """Bring the members of an ensemble up to date; what went wrong with each."""
        limiter = self._lifecycle.limiter
        failures: dict[str, HostError] = {}

        async def bring(member: str) -> None:
            if limiter.find_wait_chain(member, name):
                failures[member] = circular_dependency_error(member, name)  # it waits for this one
                return
            if member not in self._tasks and not self._known.is_served_or_loading(member):
                self._known.implicit.add(member)
            try:
                with limiter.waits_for(name, member):
                    await self._load_once(member, self._bring_up_to_date(member))
            except HostError as error:
                failures[member] = error

        await asyncio.gather(*map(bring, sorted(members)))
        return failures

    async def _reload_users(self) -> None:
        """Load the ensembles anew whose members have changed; those that do not fit go."""
        known = self._known
        while True:
            users = {
                user for name in self._changed for user in known.dependents_of(name, maybe=True)
            }
            left = [
                user
                for user in sorted(users)
                if user not in self._tasks
                and (known.is_served_or_loading(user) or user in known.orphans)
            ]
            if not left:
                return
            for user in left:
                try:
                    await self._load_once(user, self._bring_up_to_date(user))
                except RepositoryReadError:
                    pass  # what is wrong is its own configuration; it is in the log
                except HostError as error:
                    _log.info("unloading ensemble '%s': %s", user, error.message)
                    self._orphan(user)

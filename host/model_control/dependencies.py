"""Loads and unloads models together with the ensembles that use them."""

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
    """Keeps ensembles and their step models consistent. Belongs to the event loop.

    Step models load before their ensemble. When a step model changes, its ensembles are reloaded;
    when it is unloaded, they are unloaded, and they are loaded again when it comes back
    (docs/reference/configuration-and-scheduling.md, "How a load proceeds", "Load requests", "Unload
    requests").
    """

    def __init__(self, registry: Registry, lifecycle: ModelLifecycle) -> None:
        self.lifecycle = lifecycle
        self._graph = DependencyGraph(registry)
        self._in_progress: dict[asyncio.Task[bool], LoadOrder] = {}

    def create_load_order(self, polled: bool = False, if_missing: bool = False) -> LoadOrder:
        """A group of loads that are requested together.

        `polled`: by the poller. `if_missing`: models that serve stay as they are.
        """
        return LoadOrder(
            self.lifecycle,
            self._graph,
            self._unload_incomplete_ensemble,
            self._in_progress,
            polled,
            if_missing,
        )

    async def load_all(self, names: Iterable[str]) -> bool:
        """Loads these models; returns whether all are ready. Failures go to log and registry."""
        return all(await asyncio.gather(*map(self.create_load_order().try_load, names)))

    async def load(
        self, names: Sequence[str], override: Override | None = None, if_missing: bool = False
    ) -> dict[str, HostError]:
        """Loads models: first their step models, then they themselves, then their ensembles.

        Returns the errors by model. Otherwise as `ModelLifecycle.load`.
        """
        order = self.create_load_order(if_missing=if_missing)
        loads = (order.load(name, override) for name in names)
        results = zip(names, await asyncio.gather(*loads, return_exceptions=True), strict=True)
        order.release_tasks()
        failures: dict[str, HostError] = {}
        for name, result in results:
            if isinstance(result, HostError):
                failures[name] = result.with_traceback(None)  # as above
            elif result is not None:
                raise result
        return failures

    async def unload_in_turn(self, name: str, dependents: bool = False) -> None:
        """Waits for the loads in progress that concern the model, then as `unload`.

        Source: docs/reference/configuration-and-scheduling.md, "Load requests".
        """
        while loads := self._loads_of(name, dependents):
            await asyncio.wait(loads)
        self.unload(name, dependents)

    def _loads_of(self, name: str, dependents: bool) -> list[asyncio.Task[bool]]:
        names = [name]
        for one in names:
            if dependents:
                names += self._graph.dependencies_of(one).difference(names)
        return [task for task, order in self._in_progress.items() if order.includes_any(names)]

    async def follow_remote_model(self, name: str) -> bool:
        """Reloads the ensembles that use a model of another server, as its versions have changed.

        They are unloaded if it has none. Returns whether what is served has changed.
        """
        if self._graph.is_served_or_loading(name):
            return await self.create_load_order().reload_users_of(name)
        users = filter(self._graph.is_served_or_loading, self._graph.dependents_of(name))
        changed = any(users)
        self._unload_users(name)
        return changed

    def waiting_ensembles(self) -> dict[str, list[str]]:
        """Ensembles that are loaded when their models are, and which of them are remote."""
        graph = self._graph
        return {name: graph.unloaded_remote_models(name) for name in sorted(graph.orphans)}

    def models_in_progress(self) -> set[str]:
        """The models that loads in progress load, have loaded, or need."""
        return set().union(*(order.names for order in self._in_progress.values()))

    def models_in_progress_with(self, name: str) -> set[str]:
        """The models of those loads in progress that concern this model."""
        orders = (order for order in self._in_progress.values() if order.includes_any([name]))
        return set().union(*(order.names for order in orders))

    def users_of(self, name: str) -> list[str]:
        """The ensembles that use a model."""
        return self._graph.dependents_of(name)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Starts to unload a model and the ensembles that use it.

        `dependents`: also unloads step models that were loaded only for it and that no other
        ensemble uses.
        """
        graph = self._graph
        self.lifecycle.unload(name)
        self._clear_unload_reason(name)
        self._unload_users(name)
        if dependents:
            for step_model in sorted(graph.dependencies_of(name)):
                if step_model in graph.implicit and not graph.is_needed(step_model):
                    self.unload(step_model, dependents=True)

    def remove_model(self, name: str) -> None:
        """Unloads a model that should not be served any more, and drops its failures."""
        self.lifecycle.remove_model(name)
        self._graph.remove_model(name)
        self._clear_unload_reason(name)
        self._unload_users(name)

    def _clear_unload_reason(self, name: str) -> None:
        self._graph.orphans.discard(name)
        self._graph.implicit.discard(name)

    def _unload_incomplete_ensemble(self, name: str) -> None:
        """Unloads an ensemble until its step models are loaded and fit again."""
        self._graph.orphans.add(name)
        self.lifecycle.unload(name, keep_override=True)
        self._unload_users(name)

    def _unload_users(self, name: str) -> None:
        for user in self._graph.dependents_of(name):
            if self._graph.is_served_or_loading(user):
                _log.info("unloading ensemble '%s', which uses '%s'", user, name)
                self._unload_incomplete_ensemble(user)


class LoadOrder:
    """A group of loads; each model is brought up to date once for all of them."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        graph: DependencyGraph,
        unload_incomplete: Callable[[str], None],
        in_progress: dict[asyncio.Task[bool], LoadOrder],
        polled: bool,
        if_missing: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._graph = graph
        self._unload_incomplete = unload_incomplete
        self._in_progress = in_progress
        self._polled = polled
        self._if_missing = if_missing
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._changed: set[str] = set()

    def release_tasks(self) -> None:
        """Drops the tasks of a group whose loads have ended.

        The traceback of a load that failed refers to the files of the load and to this group, so
        they would be kept until the next collection of garbage, which may be hours away.
        """
        self._tasks.clear()

    @property
    def names(self) -> set[str]:
        """The models of this group so far."""
        return set(self._tasks)

    def includes_any(self, names: Iterable[str]) -> bool:
        """Whether one of these models belongs to this group."""
        return not self._tasks.keys().isdisjoint(names)

    async def try_load(self, name: str) -> bool:
        """As `load`, but records a failure in the registry; returns whether the load succeeded.

        An ensemble waits for models that other servers have unloaded; that is no failure.
        """
        try:
            await self.load(name)
        except HostError as error:
            if missing := self._graph.unloaded_remote_models(name):
                _log.info("ensemble '%s' waits for %s, unloaded at another server", name, missing)
                self._unload_incomplete(name)
                return True
            self._lifecycle.record_failure(name, error)
            return False
        return True

    async def reload_users_of(self, name: str) -> bool:
        """Reloads the ensembles that use a model; returns whether one has changed."""
        self._changed.add(name)
        # The loads go on if the caller is cancelled.
        reload = self._task(self._reload_users_of(name))
        self._in_progress[reload] = self
        reload.add_done_callback(self._in_progress.pop)
        return await asyncio.shield(reload)

    async def _reload_users_of(self, name: str) -> bool:
        await self._reload_users()
        return self._changed != {name}

    async def load(self, name: str, override: Override | None = None) -> None:
        """Loads step models, the model, and the ensembles that use it. Raises HostError."""
        self._graph.implicit.discard(name)
        # The load goes on if its caller is cancelled.
        loading = self._task(self._load(name, override))
        self._in_progress[loading] = self
        loading.add_done_callback(self._in_progress.pop)
        await asyncio.shield(loading)

    async def _load(self, name: str, override: Override | None) -> bool:
        changed = await self._load_once(name, self._bring_up_to_date(name, override, named=True))
        await self._reload_users()
        return changed

    async def _load_once(self, name: str, load: Coroutine[Any, Any, bool]) -> bool:
        """Waits for the one load of the model in this group; returns whether the model changed."""
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
        """Brings a model up to date after its step models. `named`: the caller asked for it."""
        graph = self._graph
        step_models = graph.dependencies_of(name)
        changed_steps = False
        if step_models and override is None:
            found = await self._lifecycle.resolve_step_models(name, graph.step_names_of(name))
            before, step_models = step_models, frozenset(found.values())
            await self._load_step_models(name, step_models)
            changed_steps = step_models != before or not self._changed.isdisjoint(step_models)
        if not named and (lasting := self._lifecycle.lasting_override(name)) is not None:
            if graph.is_served_or_loading(name) and not changed_steps:
                return False  # no client has asked for the files on disk again
            override = lasting
        changed = await self._lifecycle.load(
            name,
            override,
            polled=self._polled,
            if_missing=self._if_missing,
            force=changed_steps,
            prepare=partial(self._prepare, name),
        )
        graph.orphans.discard(name)
        if changed:
            self._changed.add(name)
        return changed

    async def _prepare(self, name: str, config: ModelConfig) -> None:
        """Loads the step models of an ensemble before it. Raises HostError.

        Source: docs/reference/configuration-and-scheduling.md, "Checks against the composing
        models".
        """
        steps = config.ensemble_scheduling.step
        found = await self._lifecycle.resolve_step_models(name, {step.model_name for step in steps})
        step_models = self._graph.record_model(name, config, found)
        if step_models:
            self._graph.validate_ensemble(
                name, config, await self._load_step_models(name, step_models)
            )

    async def _load_step_models(
        self, name: str, step_models: Iterable[str]
    ) -> dict[str, HostError]:
        """Brings the step models of an ensemble up to date; returns their errors."""
        limiter = self._lifecycle.limiter
        failures: dict[str, HostError] = {}

        async def load_step_model(step_model: str) -> None:
            if limiter.find_wait_chain(step_model, name):
                # Its load waits for this one.
                failures[step_model] = circular_dependency_error(step_model, name)
                return
            if step_model not in self._tasks and not self._graph.is_served_or_loading(step_model):
                self._graph.implicit.add(step_model)
            try:
                with limiter.waits_for(name, step_model):
                    await self._load_once(step_model, self._bring_up_to_date(step_model))
            except HostError as error:
                failures[step_model] = error

        await asyncio.gather(*map(load_step_model, sorted(step_models)))
        return failures

    async def _reload_users(self) -> None:
        """Reloads ensembles whose step models changed; unloads those that do not fit any more."""
        graph = self._graph
        while True:
            users = {
                user for name in self._changed for user in graph.dependents_of(name, maybe=True)
            }
            left = [
                user
                for user in sorted(users)
                if user not in self._tasks
                and (graph.is_served_or_loading(user) or user in graph.orphans)
            ]
            if not left:
                return
            for user in left:
                try:
                    await self._load_once(user, self._bring_up_to_date(user))
                except RepositoryReadError:
                    pass  # its own configuration is wrong; the log says so
                except HostError as error:
                    _log.info("unloading ensemble '%s': %s", user, error.message)
                    self._unload_incomplete(user)

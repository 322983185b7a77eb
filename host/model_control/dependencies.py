"""Loads and unloads models with those that they depend on, and with those that depend on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from host.errors import HostError
from host.model_control.dependency_graph import DependencyGraph, circular_dependency_error
from host.model_control.lifecycle import ModelLifecycle
from host.model_control.load_planner import LoadRequest, PlannedModel
from host.models.loaders import RepositoryReadError
from host.models.registry import Registry

_log = logging.getLogger("pbhost")

_PLAIN = LoadRequest()  # without an override, whatever serves


class EnsembleDependencies:
    """Keeps ensembles and their step models consistent. Belongs to the event loop.

    Step models load before their ensemble. When a step model changes, its ensembles are reloaded;
    when it is unloaded, they are unloaded, and they are loaded again when it returns
    (docs/reference/model-control.md, "How a load proceeds", "Load requests", "Unload
    requests").
    """

    def __init__(self, registry: Registry, lifecycle: ModelLifecycle) -> None:
        self.lifecycle = lifecycle
        self.graph = DependencyGraph(registry)
        self.in_progress: dict[asyncio.Task[Any], LoadOrder] = {}
        """The loads in progress, each with its group."""

    async def load_all(self, names: Iterable[str]) -> bool:
        """Loads these models; returns whether all are ready. Failures go to log and registry."""
        names = list(names)
        return all(await asyncio.gather(*map(LoadOrder(self, names).try_load, names)))

    def start_load(
        self, names: Sequence[str], request: LoadRequest
    ) -> asyncio.Future[dict[str, HostError]]:
        """Starts to load models: their step models, they themselves, and then their ensembles.

        The result has the errors by model. The load continues if the wait for it is cancelled.
        Raises HostError, as the result may.
        """
        order = LoadOrder(self, names, request)
        loading = order.start_load(names)
        loading.add_done_callback(lambda _: order.release_tasks())
        return asyncio.shield(loading)

    async def unload_in_turn(self, name: str, dependents: bool = False) -> None:
        """Waits for the loads in progress that concern the model, then as `unload`.

        Source: docs/reference/model-control.md, "Load requests".
        """
        while loads := self._loads_of(name, dependents):
            await asyncio.wait(loads)
        self.unload(name, dependents)

    async def wait_surplus_ended(self, names: Iterable[str]) -> None:
        """As that of the lifecycle, for these models and their step models."""
        await self.lifecycle.wait_surplus_ended(self._with_dependencies(names))

    def _with_dependencies(self, names: Iterable[str]) -> list[str]:
        found = list(names)
        for one in found:
            found += self.graph.dependencies_of(one).difference(found)
        return found

    def _loads_of(self, name: str, dependents: bool) -> list[asyncio.Task[Any]]:
        names = self._with_dependencies([name]) if dependents else [name]
        return [task for task, order in self.in_progress.items() if order.includes_any(names)]

    async def follow_remote_model(self, name: str) -> bool:
        """Reloads the ensembles that use a model of another server, as its versions have changed.

        They are unloaded if it has none. Returns whether what is served has changed.
        """
        if self.graph.is_served_or_loading(name):
            return await LoadOrder(self).reload_users_of(name)
        users = filter(self.graph.is_served_or_loading, self.graph.dependents_of(name))
        changed = any(users)
        self._unload_users(name)
        return changed

    def waiting_ensembles(self) -> dict[str, list[str]]:
        """Ensembles that are loaded when their models are, and which of them are remote."""
        graph = self.graph
        return {name: graph.unloaded_remote_models(name) for name in sorted(graph.orphans)}

    def models_in_progress(self) -> set[str]:
        """The models that loads in progress load, have loaded, or need."""
        return set().union(*(order.names for order in self.in_progress.values()))

    def models_in_progress_with(self, name: str) -> set[str]:
        """The models of those loads in progress that concern this model."""
        orders = (order for order in self.in_progress.values() if order.includes_any([name]))
        return set().union(*(order.names for order in orders))

    def unload(self, name: str, dependents: bool = False) -> None:
        """Starts to unload a model and the ensembles that use it.

        `dependents`: also unloads step models that were loaded only for it and that no other
        ensemble uses.
        """
        graph = self.graph
        self.lifecycle.unload(name)
        self._clear_unload_reason(name)
        self._unload_users(name)
        if dependents:
            for step_model in sorted(graph.dependencies_of(name)):
                if step_model in graph.implicit and not graph.is_needed(step_model):
                    self.unload(step_model, dependents=True)

    def remove_model(self, name: str) -> None:
        """Unloads a model that should no longer be served, and drops its failures."""
        self.lifecycle.remove_model(name)
        self.graph.remove_model(name)
        self._clear_unload_reason(name)
        self._unload_users(name)

    def _clear_unload_reason(self, name: str) -> None:
        self.graph.orphans.discard(name)
        self.graph.implicit.discard(name)

    def unload_incomplete(self, name: str) -> None:
        """Unloads an ensemble until its step models are loaded and fit again."""
        self.graph.orphans.add(name)
        self.lifecycle.unload(name, keep_override=True)
        self._unload_users(name)

    def _unload_users(self, name: str) -> None:
        for user in self.graph.dependents_of(name):
            if self.graph.is_served_or_loading(user):
                _log.info("unloading ensemble '%s', which uses '%s'", user, name)
                self.unload_incomplete(user)


class LoadOrder:
    """A group of loads; each model is brought up to date once for all of them.

    One plan says which models that are and in which order they load. Ensembles that use what has
    changed are planned when it has.
    """

    def __init__(
        self,
        dependencies: EnsembleDependencies,
        names: Iterable[str] = (),
        request: LoadRequest = _PLAIN,
    ) -> None:
        self._dependencies = dependencies
        self._lifecycle = dependencies.lifecycle
        self._graph = dependencies.graph
        self._named = dict.fromkeys(names, "")
        self._request = request
        self._planning: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._changed: set[str] = set()

    def release_tasks(self) -> None:
        """Drops the tasks of a group whose loads have ended.

        The traceback of a load that failed refers to the files of the load and to this group, so
        they would be kept until the next collection of garbage, which may be hours away.
        """
        self._tasks.clear()
        self._planning, self._request = None, _PLAIN

    @property
    def names(self) -> set[str]:
        """The models of this group so far."""
        return {*self._named, *self._tasks}

    def includes_any(self, names: Iterable[str]) -> bool:
        """Whether one of these models belongs to this group."""
        return not self.names.isdisjoint(names)

    async def try_load(self, name: str) -> bool:
        """Loads one of the models, and records a failure in the registry; returns its success.

        An ensemble waits for models that other servers have unloaded; that is no failure.
        """
        try:
            failures = await asyncio.shield(self.start_load([name]))
        except HostError as error:
            failures = {name: error}
        if not failures:
            return True
        if missing := self._graph.unloaded_remote_models(name):
            _log.info("ensemble '%s' waits for %s, unloaded at another server", name, missing)
            self._dependencies.unload_incomplete(name)
            return True
        self._lifecycle.record_failure(name, failures[name])
        return False

    async def reload_users_of(self, name: str) -> bool:
        """Reloads the ensembles that use a model; returns whether one has changed."""
        self._changed.add(name)
        reload = self._lifecycle.start_load(self._reload_users_of(name))
        self._track(reload)
        return await asyncio.shield(reload)

    async def _reload_users_of(self, name: str) -> bool:
        await self._reload_users()
        return self._changed != {name}

    def start_load(self, names: Sequence[str]) -> asyncio.Task[dict[str, HostError]]:
        """Starts to load step models, some of the models, and the ensembles that use them.

        The result has the errors by model. Raises HostError, as the result may.
        """
        self._graph.implicit.difference_update(names)
        loading = self._lifecycle.start_load(self._load(names))
        self._track(loading)
        return loading

    def _track(self, load: asyncio.Task[Any]) -> None:
        in_progress = self._dependencies.in_progress
        in_progress[load] = self
        load.add_done_callback(in_progress.pop)

    async def _load(self, names: Sequence[str]) -> dict[str, HostError]:
        if self._planning is None:
            planning = self._start(self._named)
            self._planning = self._lifecycle.start_load(planning)
        await asyncio.shield(self._planning)
        loads = (asyncio.shield(self._tasks[name]) for name in names)
        results = await asyncio.gather(*loads, return_exceptions=True)
        failures: dict[str, HostError] = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, HostError):
                failures[name] = result.with_traceback(None)  # as in `release_tasks`
            elif isinstance(result, BaseException):
                raise result
        if len(failures) < len(names):
            await self._reload_users()
        return failures

    async def _start(self, names: Mapping[str, str]) -> None:
        """Plans the load of these models, and starts to execute the plan.

        `names`: the models, and why each is loaded. Models that this group has are left out.
        """
        new = {name: reason for name, reason in names.items() if name not in self._tasks}
        plan = await self._lifecycle.planner.plan_load(
            new, self._request, self._graph.dependencies_of, self._tasks
        )
        if len(plan) > 1:
            lines = (f"{number}. {planned}" for number, planned in enumerate(plan, 1))
            _log.debug("models to load:\n%s", "\n".join(lines))
        for planned in plan:
            name = planned.name
            if name not in self._tasks:
                if name not in self._named and not self._graph.is_served_or_loading(name):
                    self._graph.implicit.add(name)
                load = (
                    self._learn_remote(name)
                    if self._lifecycle.planner.is_remote(name)
                    else self._bring_up_to_date(planned)
                )
                self._tasks[name] = self._lifecycle.start_load(load)

    async def _learn_remote(self, name: str) -> bool:
        """Learns of a model that another server loads; returns whether it has changed."""
        changed = await self._lifecycle.planner.learn_remote(name)
        if changed:
            self._changed.add(name)
        return changed

    async def _bring_up_to_date(self, planned: PlannedModel) -> bool:
        """Loads a model after its step models; returns whether what is served has changed.

        Source: docs/reference/ensembles.md, "Checks against the composing
        models".
        """
        name, graph, lifecycle = planned.name, self._graph, self._lifecycle
        async with lifecycle.lock_model(planned) as planned:
            force = False
            if planned.loaded is not None:
                config = planned.loaded.config
                before = graph.dependencies_of(name)
                step_models = graph.record_model(name, config, planned.step_models)
                failures = await self._wait_for_step_models(planned)
                moved = bool(before) and before != step_models
                force = moved or not self._changed.isdisjoint(step_models)
                if planned.keeps_override and graph.is_served_or_loading(name) and not force:
                    return False  # no client has asked for the files on disk again
                current = lifecycle.planner.is_up_to_date(planned)
                if step_models and (force or not current):
                    graph.validate_ensemble(name, config, failures)
            changed = await lifecycle.load_versions(planned, force)
        graph.orphans.discard(name)
        if changed:
            self._changed.add(name)
        return changed

    async def _wait_for_step_models(self, planned: PlannedModel) -> dict[str, HostError]:
        """Waits for the loads of the step models of an ensemble; returns their errors."""
        name, limiter = planned.name, self._lifecycle.limiter
        failures: dict[str, HostError] = {}
        steps = sorted(set(planned.step_models.values()))
        await self._start(dict.fromkeys(steps, f"step of '{name}'"))  # those of new files

        async def wait(step: str) -> None:
            if limiter.find_wait_chain(step, name):
                # Its load waits for this one.
                failures[step] = circular_dependency_error(step, name)
                return
            try:
                with limiter.waits_for(name, step):
                    await asyncio.shield(self._tasks[step])
            except HostError as error:
                failures[step] = error

        await asyncio.gather(*map(wait, steps))
        return failures

    async def _reload_users(self) -> None:
        """Reloads ensembles whose step models changed; unloads those that no longer fit."""
        graph = self._graph
        while True:
            users = {
                user: f"uses '{name}'"
                for name in sorted(self._changed)
                for user in graph.dependents_of(name, maybe=True)
                if user not in self._tasks
                and (graph.is_served_or_loading(user) or user in graph.orphans)
            }
            if not users:
                return
            await self._start(users)
            for user in sorted(users):
                try:
                    await asyncio.shield(self._tasks[user])
                except RepositoryReadError:
                    pass  # its own configuration is wrong; the log says so
                except HostError as error:
                    _log.info("unloading ensemble '%s': %s", user, error.message)
                    self._dependencies.unload_incomplete(user)

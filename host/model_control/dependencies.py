"""Which models depend on which, and loads in the order of the dependencies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from host.config.schema import ModelConfig, is_ensemble
from host.ensembles.compatibility import check_step_models
from host.errors import HostError, invalid_argument
from host.model_control.lifecycle import ModelLifecycle
from host.model_control.load_planner import PlannedModel
from host.models.loaders import RepositoryReadError, VersionLoadError
from host.models.registry import Registry, VersionState
from host.repository.override import Override
from host.repository.repository import qualified_name


class DependencyGraph:
    """The step models of each ensemble, by its configuration as it was read last."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._members: dict[str, dict[str, str]] = {}  # ensemble: qualified names by names
        self.implicit: set[str] = set()
        """Models that are loaded only because an ensemble needs them."""
        self.orphans: set[str] = set()
        """Ensembles that were unloaded with a step model, and are loaded again with it."""

    def record_model(
        self, name: str, config: ModelConfig, found: Mapping[str, str]
    ) -> frozenset[str]:
        """Records the step models of an ensemble and returns them; nothing for other models.

        `found`: qualified names of the step models by name. Each step of `config` gets the
        namespace of its model.
        """
        self._members.pop(name, None)
        if not is_ensemble(config):
            return frozenset()
        for step in config.ensemble_scheduling.step:
            step.model_namespace = self._registry.namespace_of(found[step.model_name])
        self._members[name] = dict(found)
        return self.dependencies_of(name)

    def remove_model(self, name: str) -> None:
        """Forgets a model that is no longer served."""
        self._members.pop(name, None)

    def dependencies_of(self, name: str) -> frozenset[str]:
        """The step models of an ensemble, by qualified name."""
        return frozenset(self._members.get(name, {}).values())

    def dependents_of(self, name: str, maybe: bool = False) -> list[str]:
        """The ensembles that use a model; with `maybe`, also those that use one of its name."""
        plain = self._registry.name_of(name)
        return sorted(
            user
            for user, members in self._members.items()
            if (plain in members if maybe else name in members.values())
        )

    def is_served_or_loading(self, name: str) -> bool:
        """Whether a version is ready or loading."""
        versions = self._registry.versions(name).values()
        return any(
            version.state in (VersionState.READY, VersionState.LOADING) for version in versions
        )

    def unloaded_remote_models(self, name: str) -> list[str]:
        """The step models of an ensemble that no other server has loaded."""
        known = filter(self._registry.is_remote, self.dependencies_of(name))
        return sorted(member for member in known if not self._registry.versions(member))

    def is_needed(self, name: str) -> bool:
        """Whether an ensemble that is served or loading uses the model."""
        return any(self.is_served_or_loading(user) for user in self.dependents_of(name))

    def validate_ensemble(
        self, name: str, config: ModelConfig, failures: Mapping[str, HostError]
    ) -> None:
        """Checks that an ensemble fits its step models, and sets whether it is decoupled.

        `failures`: the errors of step models that did not load. Raises HostError INVALID_ARG
        (docs/reference/ensembles.md, "Checks against the composing models").
        """
        last = self.find_cycle_end(name)
        if last:
            raise circular_dependency_error(name, last)
        missing = [
            self._registry.name_of(member)
            for member in sorted(self.dependencies_of(name))
            if isinstance(failures.get(member), RepositoryReadError)
            and not self.is_served_or_loading(member)
        ]
        if missing:
            raise models_unavailable_error(name, missing)
        steps = config.ensemble_scheduling.step
        members = [self._step_model_config(name, step, failures) for step in steps]
        config.model_transaction_policy.decoupled = check_step_models(config, members)

    def find_cycle_end(self, name: str) -> str:
        """The model that leads back to `name`, or "" if the graph has no cycle there."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            current = todo.pop()
            for member in sorted(self.dependencies_of(current)):
                if member == name:
                    return current
                if member not in seen:
                    seen.add(member)
                    todo.append(member)
        return ""

    def _step_model_config(
        self, ensemble: str, step: Any, failures: Mapping[str, HostError]
    ) -> ModelConfig:
        """The configuration of the version that a step calls."""
        name, number = step.model_name, step.model_version
        known = qualified_name(step.model_namespace, name)
        depends = f"ensemble '{ensemble}' depends on '{name}'"
        failure = failures.get(known)
        ready = {
            version.number: version.model
            for version in self._registry.versions(known).values()
            if version.state is VersionState.READY and version.model is not None
        }
        if not ready:
            if failure is None:
                raise invalid_argument(f"{depends} which has no loaded version.")
            if isinstance(failure, VersionLoadError):
                raise invalid_argument(
                    f"{depends} which has no loaded version. Model '{name}' loading failed with"
                    f" error: {failure.message}"
                )
            raise invalid_argument(
                f"{depends} which is not valid. Model '{name}' failed with error: {failure.message}"
            )
        if number == -1:
            number = max(ready)
        if number not in ready:
            raise version_not_loaded_error(ensemble, name, number)
        return ready[number].config


def circular_dependency_error(name: str, last: str) -> HostError:
    """The error of an ensemble that contains itself; `last` leads back to it."""
    return invalid_argument(
        f"circular dependency between ensembles: {name} -> ... -> {last} -> {name}"
    )


def models_unavailable_error(name: str, missing: Sequence[str]) -> HostError:
    """The error of an ensemble whose step models do not exist."""
    return invalid_argument(
        f"ensemble {name} contains models that are not available or ambiguous: {', '.join(missing)}"
    )


def version_not_loaded_error(name: str, member: str, version: int) -> HostError:
    """The error of an ensemble that calls a version which is not loaded."""
    return invalid_argument(
        f"ensemble '{name}' depends on '{member}' whose required version {version} is not loaded."
    )


_log = logging.getLogger("pbhost")


class EnsembleDependencies:
    """Keeps ensembles and their step models consistent. Belongs to the event loop.

    Step models load before their ensemble. When a step model changes, its ensembles are reloaded;
    when it is unloaded, they are unloaded, and they are loaded again when it returns
    (docs/reference/model-control.md, "How a load proceeds", "Load requests", "Unload
    requests").
    """

    def __init__(self, registry: Registry, lifecycle: ModelLifecycle) -> None:
        self.lifecycle = lifecycle
        self._graph = DependencyGraph(registry)
        self._in_progress: dict[asyncio.Task[Any], LoadOrder] = {}

    def create_load_order(
        self,
        names: Iterable[str] = (),
        override: Override | None = None,
        *,
        polled: bool = False,
        if_missing: bool = False,
    ) -> LoadOrder:
        """A group of loads that are requested together.

        `polled`: by the poller. `if_missing`: models that serve stay as they are.
        """
        return LoadOrder(
            self.lifecycle,
            self._graph,
            self._unload_incomplete_ensemble,
            self._in_progress,
            names,
            override,
            polled,
            if_missing,
        )

    async def load_all(self, names: Iterable[str]) -> bool:
        """Loads these models; returns whether all are ready. Failures go to log and registry."""
        names = list(names)
        return all(await asyncio.gather(*map(self.create_load_order(names).try_load, names)))

    def start_load(
        self, names: Sequence[str], override: Override | None = None, if_missing: bool = False
    ) -> asyncio.Future[dict[str, HostError]]:
        """Starts to load models: their step models, they themselves, and then their ensembles.

        The result has the errors by model. The load continues if the wait for it is cancelled.
        Raises HostError, as the result may.
        """
        order = self.create_load_order(names, override, if_missing=if_missing)
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
            found += self._graph.dependencies_of(one).difference(found)
        return found

    def _loads_of(self, name: str, dependents: bool) -> list[asyncio.Task[Any]]:
        names = self._with_dependencies([name]) if dependents else [name]
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
        """Unloads a model that should no longer be served, and drops its failures."""
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
    """A group of loads; each model is brought up to date once for all of them.

    One plan says which models that are and in which order they load. Ensembles that use what has
    changed are planned when it has.
    """

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        graph: DependencyGraph,
        unload_incomplete: Callable[[str], None],
        in_progress: dict[asyncio.Task[Any], LoadOrder],
        names: Iterable[str],
        override: Override | None,
        polled: bool,
        if_missing: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._graph = graph
        self._unload_incomplete = unload_incomplete
        self._in_progress = in_progress
        self._named = dict.fromkeys(names, "")
        self._override = override
        self._planning: asyncio.Task[None] | None = None
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
        self._planning = self._override = None

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
            self._unload_incomplete(name)
            return True
        self._lifecycle.record_failure(name, failures[name])
        return False

    async def reload_users_of(self, name: str) -> bool:
        """Reloads the ensembles that use a model; returns whether one has changed."""
        self._changed.add(name)
        reload = self._lifecycle.start_load(self._reload_users_of(name))
        self._in_progress[reload] = self
        reload.add_done_callback(self._in_progress.pop)
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
        self._in_progress[loading] = self
        loading.add_done_callback(self._in_progress.pop)
        return loading

    async def _load(self, names: Sequence[str]) -> dict[str, HostError]:
        if self._planning is None:
            planning = self._start(self._named, self._override)
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

    async def _start(self, names: Mapping[str, str], override: Override | None = None) -> None:
        """Plans the load of these models, and starts to execute the plan.

        `names`: the models, and why each is loaded. Models that this group has are left out.
        """
        new = {name: reason for name, reason in names.items() if name not in self._tasks}
        plan = await self._lifecycle.planner.plan_load(
            new, override, self._graph.dependencies_of, self._tasks, self._if_missing
        )
        if len(plan.models) > 1:
            _log.debug("models to load:\n%s", plan)
        for planned in plan.models:
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
        polled, if_missing = self._polled, self._if_missing
        async with lifecycle.lock_model(planned, polled, if_missing) as planned:
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
                current = lifecycle.planner.is_up_to_date(planned, polled, if_missing)
                if step_models and (force or not current):
                    graph.validate_ensemble(name, config, failures)
            changed = await lifecycle.load_versions(planned, polled, if_missing, force)
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
                    self._unload_incomplete(user)

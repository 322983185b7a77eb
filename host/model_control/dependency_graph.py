"""Which models depend on which: the step models of ensembles, and whether they fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from host.config.schema import ModelConfig, is_ensemble
from host.ensembles.compatibility import check_step_models
from host.errors import HostError, invalid_argument
from host.models.loaders import RepositoryReadError, VersionLoadError
from host.models.registry import Registry, VersionState
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

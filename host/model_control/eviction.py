"""Chooses the models that are unloaded to make room for others, and unloads them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from host.config.load_parameters import is_pinned
from host.logs.formats import model_fields
from host.model_control.dependencies import EnsembleDependencies
from host.models.registry import ModelVersion, Registry, VersionState

_log = logging.getLogger("pbhost")


class Evictions:
    """Unloads idle models that the next request can load again. Belongs to the event loop.

    `is_awaited`: whether a request waits for this model. `bls_waits`: the models that requests of
    models wait for until they are loaded, by the model that asks.
    """

    def __init__(
        self,
        registry: Registry,
        dependencies: EnsembleDependencies,
        is_awaited: Callable[[str], bool],
        bls_waits: Callable[[], dict[str, set[str]]],
    ) -> None:
        self._registry = registry
        self._dependencies = dependencies
        self._is_awaited = is_awaited
        self._bls_waits = bls_waits
        self.counts: Counter[str] = Counter()
        """How often each model was unloaded to make room."""

    def find_victims(self) -> list[str]:
        """The models that can be unloaded now, least recently used first."""
        loading = self._dependencies.models_in_progress()
        found = [
            (max(map(self._last_used, self._with_users(name))), name)
            for name, entry in self._registry.list_entries()
            if any(version.state is VersionState.READY for version in entry.versions.values())
            and not any(
                one in loading or self.reason_to_keep(one) or self._is_in_use(one)
                for one in self._with_users(name)
            )
        ]
        return [name for _, name in sorted(found)]

    def find_leaving(self) -> set[str]:
        """The models that are being unloaded, so that their memory will be free soon."""
        leaving = self._dependencies.lifecycle.retiring_models()
        return {name for name in leaving if not self._ready_versions(name)}

    def reason_to_keep(self, name: str) -> str:
        """Why a model that serves is never unloaded to make room; "" if it may be, or is not."""
        versions = self._ready_versions(name)
        if not versions:
            return ""
        if any(version.model and is_pinned(version.model.config) for version in versions):
            return "pinned"
        if name not in self._registry.on_demand:
            return "does not load on demand"
        if self._dependencies.lifecycle.has_override(name):
            return "has a configuration or files from a client"
        return ""

    def find_waiters(self, name: str) -> set[str]:
        """The models whose requests, or whose own loads, wait for the load of this one."""
        lifecycle = self._dependencies.lifecycle
        waiters = {caller for caller, awaited in self._bls_waits().items() if name in awaited}
        waiters |= {
            other
            for other, _ in self._registry.list_entries()
            if lifecycle.limiter.find_wait_chain(other, name)
        }
        return waiters - {name}

    def find_holders(self, name: str) -> set[str]:
        """The models that serve, and stay loaded until the load of this one has ended.

        They wait for it, or an ensemble needs them beside it. So does the model itself, if it is
        loaded again.
        """
        together = self._dependencies.models_in_progress_with(name)
        holders = self.find_waiters(name) | together | {name}
        return {holder for holder in holders if self._ready_versions(holder)}

    def evict(self, name: str) -> None:
        """Starts to unload a model and the ensembles that use it."""
        self.counts[name] += 1
        _log.info(
            "unloading '%s' to make room in the memory budget", name, extra=model_fields(name)
        )
        for one in self._with_users(name):
            self._dependencies.lifecycle.unload(one)

    def _with_users(self, name: str) -> list[str]:
        """A model, and the ensembles that use it, directly or not, and serve."""
        names = [name]
        for one in names:  # grows meanwhile
            names += [
                user
                for user in self._dependencies.users_of(one)
                if user not in names and self._ready_versions(user)
            ]
        return names

    def _ready_versions(self, name: str) -> list[ModelVersion]:
        versions: Iterable[ModelVersion] = self._registry.versions(name).values()
        return [version for version in versions if version.state is VersionState.READY]

    def _is_in_use(self, name: str) -> bool:
        return self._is_awaited(name) or any(
            version.model is not None and version.model.in_use
            for version in self._registry.versions(name).values()
        )

    def _last_used(self, name: str) -> float:
        """When the model ran last or was loaded, in seconds since 1970 UTC."""
        return max(
            (
                max(version.since, version.model.statistics().last_inference / 1000)
                for version in self._ready_versions(name)
                if version.model is not None
            ),
            default=0.0,
        )

"""Health of the server and of its models, as clients ask for it.

Source: docs/reference/protocol.md, "Health and readiness".
"""

from __future__ import annotations

from host.errors import unavailable
from host.health.model_readiness import is_model_ready
from host.health.server_state import ServerState
from host.models.registry import UNLOADED, ModelVersion, Registry, VersionState, parse_version
from host.remote.remote_models import RemoteModels


class Health:
    """`strict_readiness`: a server with a model that failed to load is not ready.

    `remote`: the models of other servers.
    """

    def __init__(
        self,
        registry: Registry,
        state: ServerState,
        strict_readiness: bool,
        remote: RemoteModels | None = None,
    ) -> None:
        self._remote = remote
        self._registry = registry
        self._state = state
        self._strict_readiness = strict_readiness

    def live(self) -> bool:
        """Whether the start has not failed. Raises HostError during the exit."""
        self._refuse_exiting()
        return not self._state.failed

    async def ready(self) -> bool:
        """Whether every model is ready; without strict readiness, whether the server has started.

        A model that loads on demand counts only while it is loaded.
        Raises HostError during the exit.
        """
        return await self.own_ready() and (self._remote is None or await self._remote.ready())

    async def own_ready(self) -> bool:
        """As `ready`, without the models of other servers. Raises HostError during the exit."""
        self._refuse_exiting()
        if not self._state.started:
            return False
        if not self._strict_readiness:
            return True
        on_demand = self._registry.on_demand
        failures = self._registry.failures.items()
        if any(failure.counts for name, failure in failures if name not in on_demand):
            return False
        for name, entry in list(self._registry.list_entries()):
            if not entry.versions and name not in on_demand:
                return False
            for version in list(entry.versions.values()):
                if name in on_demand and version.state is not VersionState.READY:
                    continue  # the next request loads it
                if not await _is_version_healthy(version):
                    return False
        return True

    async def model_ready(self, name: str, version: str) -> bool:
        """Whether this model is ready. Raises HostError if it is unknown."""
        self._refuse_exiting()
        number = parse_version(version)
        if self._remote is not None:
            await self._remote.refresh(name)
        versions = self._registry.versions(self._registry.resolve_name(name))
        if not versions and number == -1 and self._registry.is_remote(name):
            return False  # its server has unloaded it
        if not versions or (number != -1 and number not in versions):
            self._registry.find(name, number)  # raises for an unknown model
        for known in versions.values():
            if number in (-1, known.number) and known.state is VersionState.READY:
                if await is_model_ready(known.model):
                    return True
        return False

    def _refuse_exiting(self) -> None:
        if self._state.exiting:
            raise unavailable("Server exiting")


async def _is_version_healthy(version: ModelVersion) -> bool:
    """Whether a version does not keep a server with strict readiness from being ready."""
    if version.state is VersionState.READY:
        return await is_model_ready(version.model)
    return version.state is VersionState.UNAVAILABLE and version.reason == UNLOADED

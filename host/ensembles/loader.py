"""Loads ensembles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from host.cache.responses import ResponseCache
from host.cache.store import ResponseStore
from host.config import model_config as configuration
from host.config.model_config import LoadedConfig
from host.ensembles.ensemble import Ensemble
from host.errors import HostError
from host.inference.request import Tensor
from host.instances.arenas import Arenas
from host.instances.block_releases import arena_full_error
from host.instances.client_memory import write_outputs
from host.metrics.settings import MetricsSettings
from host.models.loading import InstanceUpdate
from host.models.registry import LoadedModel, Registry
from host.repository.repository import read_labels
from stub.wire.arena import ArenaFull


class EnsembleLoader:
    """The loader of ensembles. `store`: the response cache."""

    def __init__(
        self,
        registry: Registry,
        arenas: Arenas,
        *,
        metrics: MetricsSettings | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        self._registry = registry
        self._memory = _HostTensorMemory(arenas)
        self._metrics = metrics
        self._store = store

    async def load(self, directory: Path, version: int, loaded: LoadedConfig) -> LoadedModel:
        """Loads a version, whose step models are loaded. Raises HostError."""
        config = configuration.complete_config(loaded)
        labels = await asyncio.to_thread(read_labels, directory, config)
        ensemble = Ensemble(config, version, self._registry, self._memory, self._metrics, labels)
        ensemble.metrics.set_namespace(loaded.namespace)
        if self._store is not None and config.response_cache.enable:
            ensemble.cache = ResponseCache(
                self._store, version, ensemble.counters, write_outputs, loaded.namespace
            )
        return ensemble

    async def update(
        self, model: LoadedModel, loaded: LoadedConfig, finalize: float
    ) -> InstanceUpdate | None:
        """Returns None: an ensemble has no instances, so that it is loaded again."""
        return None


class _HostTensorMemory:
    """Tensors of ensembles in the host's arena, and in memory of clients."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas

    def move_to_shared_memory(self, tensor: Tensor) -> None:
        """Moves a tensor to shared memory of the host. Raises HostError if that is full."""
        try:
            self._arenas.place_tensor(tensor)
        except ArenaFull as full:
            raise arena_full_error(full) from full

    def write_outputs(self, slots: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
        """Writes outputs to memory of the client; returns the error if that fails."""
        return write_outputs(slots, outputs)

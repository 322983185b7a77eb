"""How full the queues of models are, for autoscalers, which add and remove servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from host.models.python_model import PythonModel
from host.models.registry import LoadedModel, Registry


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queues of one model or of several together.

    Attributes:
        in_flight: Requests without their last response, those in queues included.
        queued: Requests that no instance has started.
        oldest_s: Seconds that the oldest of them has waited; 0.0 if the queues are empty.
        executed: Requests that have left the queue for an instance since the load.
        waited_s: Seconds that these have waited, together. The increase of this value divided by
            that of `executed` is the mean time in the queue.
    """

    in_flight: int = 0
    queued: int = 0
    oldest_s: float = 0.0
    executed: int = 0
    waited_s: float = 0.0


def read_queues(registry: Registry, name: str = "") -> QueueState:
    """The queues of all versions of a model; "" is all models. Ensembles have no queue."""
    in_flight = queued = executed = waited_ns = 0
    oldest_ns = now = time.monotonic_ns()
    for model in _models(registry, name):
        in_flight += model.in_flight
        if isinstance(model, PythonModel):
            queued += model.scheduler.queued
            oldest_ns = min(oldest_ns, *model.queued_since(), now)
        waited = model.statistics().inference_stats.queue
        executed += waited.count
        waited_ns += waited.ns
    return QueueState(in_flight, queued, (now - oldest_ns) / 1e9, executed, waited_ns / 1e9)


def _models(registry: Registry, name: str) -> Iterator[LoadedModel]:
    for known, entry in registry.list_entries():
        if name in ("", registry.name_of(known)):
            for version in entry.versions.values():
                if version.model is not None:
                    yield version.model

"""Collects the overview of a server: what its models and instances do, and what they use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from host.instances.supervisor import Supervisor
from host.metrics.latency import latency_buckets
from host.metrics.overview import InstanceOverview, ModelOverview, ServerOverview
from host.metrics.token_latencies import token_buckets
from host.models.python_model import PythonModel
from host.models.registry import ModelVersion, Registry
from host.release import RELEASE
from host.system.resident_memory import resident_bytes

_LIFE_SECONDS = 0.5
_MEMORY_LIFE_SECONDS = 4.0


class OverviewCollector:
    """Collects the overview when asked, at most twice per second; memory more rarely.

    So any number of clients that ask again and again cost little. `model_control`: whether clients
    may load and unload models.
    """

    def __init__(self, name: str, registry: Registry, model_control: bool) -> None:
        self._name = name
        self._registry = registry
        self._model_control = model_control
        self._version = RELEASE
        self._started = time.monotonic()
        self._overview: ServerOverview | None = None
        self._collected = 0.0  # when the overview was collected, monotonic
        self._memory: dict[int, int] = {}  # resident bytes by process id
        self._measured = 0.0  # when the first of them was measured, monotonic

    def collect(self) -> ServerOverview:
        """The overview, at most half a second old."""
        now = time.monotonic()
        if self._overview is None or now - self._collected > _LIFE_SECONDS:
            if now - self._measured > _MEMORY_LIFE_SECONDS:
                self._memory.clear()
                self._measured = now
            self._collected = now
            self._overview = ServerOverview(
                name=self._name,
                version=self._version,
                uptime_seconds=round(now - self._started, 3),
                resident_bytes=self._measure(os.getpid()),
                cpu_seconds=round(time.process_time(), 3),
                model_control=self._model_control,
                models=list(self._describe_models()),
            )
        return self._overview

    def _describe_models(self) -> Iterator[ModelOverview]:
        registry = self._registry
        entries = dict(registry.list_entries())
        for known in sorted(registry.names()):
            names = registry.name_of(known), registry.namespace_of(known)
            failure, entry = registry.failures.get(known), entries.get(known)
            reason = failure.reason if failure else entry.reason if entry else ""
            if failure is not None or entry is None or not entry.versions:
                yield ModelOverview(*names, 0, "UNAVAILABLE", reason)
            for number, one in sorted(entry.versions.items()) if entry else ():
                yield self._describe_version(*names, number, one)

    def _describe_version(
        self, name: str, namespace: str, number: int, known: ModelVersion
    ) -> ModelOverview:
        model = known.model
        if model is None:
            return ModelOverview(name, namespace, number, known.state.value, known.reason)
        totals, tokens = model.metrics.totals(), model.metrics.token_latencies
        supervisors = model.supervisors if isinstance(model, PythonModel) else []
        return ModelOverview(
            name,
            namespace,
            number,
            known.state.value,
            known.reason,
            pending=model.metrics.count_pending(),
            in_flight=model.in_flight,
            success=totals.success,
            failure=totals.failures.total(),
            inferences=totals.inferences,
            executions=totals.executions,
            request_us=totals.request_ns // 1000,
            queue_us=totals.queue_ns // 1000,
            latency=latency_buckets(totals.latencies),
            first_token=token_buckets(tokens.time_to_first_token),
            inter_token=token_buckets(tokens.inter_token),
            instances=[self._describe_instance(one) for one in supervisors],
        )

    def _describe_instance(self, supervisor: Supervisor) -> InstanceOverview:
        instance = supervisor.instance
        return InstanceOverview(
            name=instance.name,
            pid=instance.pid,
            state=supervisor.state.value,
            restarts=supervisor.restarts,
            busy_us=supervisor.busy_ns // 1000,
            resident_bytes=self._measure(instance.pid),
        )

    def _measure(self, pid: int) -> int:
        if pid not in self._memory:
            self._memory[pid] = resident_bytes(pid)
        return self._memory[pid]

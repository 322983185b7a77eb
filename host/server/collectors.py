"""Collects what /metrics and the overview of models show."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from host.health import EventLoopWatchdog
from host.instances.pool import StubPool
from host.instances.supervisor import InstanceState, Supervisor
from host.metrics.custom import CustomMetrics
from host.metrics.families import MetricFamily, MetricsSnapshot, labels_of
from host.metrics.latency import latency_buckets, token_buckets
from host.metrics.machine import MachineMetrics
from host.metrics.overview import InstanceOverview, ModelOverview, ServerOverview
from host.models.python_model import PythonModel
from host.models.registry import LoadedModel, ModelVersion, Registry
from host.release import RELEASE
from host.repository.object_store.mirror import StoreMirror
from host.repository.repository import Repository, qualified_name
from host.scheduling.dynamic import DynamicScheduler
from host.system.resources import resident_bytes


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
        waited = model.metrics.counters.snapshot().inference_stats.queue
        executed += waited.count
        waited_ns += waited.ns
    return QueueState(in_flight, queued, (now - oldest_ns) / 1e9, executed, waited_ns / 1e9)


def _models(registry: Registry, name: str) -> Iterator[LoadedModel]:
    for known, entry in registry.list_entries():
        if name in ("", registry.name_of(known)):
            for version in entry.versions.values():
                if version.model is not None:
                    yield version.model


class MetricsCollector:
    """Collects the server's numbers when asked, and those of the machine at intervals.

    `interval`: `--metrics-interval-ms` in seconds; the machine is measured twice as often.
    `pinned`: size of the memory pool that Triton would have, in bytes. `others`: add the metrics of
    other parts of the server.
    """

    def __init__(
        self,
        registry: Registry,
        pool: StubPool,
        custom: CustomMetrics,
        *,
        machine: MachineMetrics | None,
        watchdog: EventLoopWatchdog,
        interval: float,
        pinned: int,
        repository: Repository,
        others: Iterable[Callable[[MetricsSnapshot], None]],
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._custom_metrics = custom
        self._machine = machine
        self._watchdog = watchdog
        self._sample_interval = max(0.001, interval / 2)
        self._pinned_pool_bytes = pinned
        self._repository = repository
        self._others = list(others)
        self._timer: asyncio.TimerHandle | None = None
        if machine is not None:
            self._sample_machine(machine)

    def _sample_machine(self, machine: MachineMetrics) -> None:
        machine.sample()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._sample_interval, self._sample_machine, machine)

    def collect(self) -> list[MetricFamily]:
        """All metrics now; first reads the updates that stubs have sent."""
        self._pool.drain()
        snapshot = MetricsSnapshot()
        entries = [entry for _, entry in self._registry.list_entries()]
        for model in [v.model for entry in entries for _, v in sorted(entry.versions.items())]:
            if model is not None:
                model.metrics.collect_into(snapshot)
            if isinstance(model, PythonModel):
                _collect_instances(snapshot, model)
        snapshot["nv_pinned_memory_pool_total_bytes"].add((), self._pinned_pool_bytes)
        snapshot["nv_pinned_memory_pool_used_bytes"].add((), 0)
        if self._machine is not None:
            self._machine.collect_into(snapshot)
        for mirror in self._repository.mirrors:
            _collect_mirror(snapshot, mirror)
        for collect_into in self._others:
            collect_into(snapshot)
        arenas = self._pool.arenas
        for owner, taken in zip(("host", "stubs"), arenas.used_bytes(), strict=True):
            snapshot["pbhost_arena_used_bytes"].add((("owner", owner),), taken)
        snapshot["pbhost_event_loop_lag_seconds"].add((), self._watchdog.lag())
        snapshot["pbhost_arena_limit_bytes"].add((), arenas.limit)
        return [*snapshot.families(), *self._custom_metrics.collect()]

    def close(self) -> None:
        """Stops measuring the machine."""
        if self._timer is not None:
            self._timer.cancel()


def _collect_mirror(snapshot: MetricsSnapshot, mirror: StoreMirror) -> None:
    counts, labels = mirror.counts, (("repository", mirror.text),)
    for name in ("listings", "listing_seconds", "fetched_bytes", "fetch_seconds", "failures"):
        snapshot[f"pbhost_repository_{name}_total"].add(labels, getattr(counts, name))
    objects = snapshot["pbhost_repository_objects_total"]
    objects.add((*labels, ("result", "fetched")), counts.fetched_objects)
    objects.add((*labels, ("result", "cached")), counts.cached_objects)


def _collect_instances(snapshot: MetricsSnapshot, model: PythonModel) -> None:
    for supervisor in model.supervisors:
        labels = labels_of({**dict(model.metrics.labels), "instance": supervisor.instance.name})
        snapshot["pbhost_stub_up"].add(labels, int(supervisor.state is InstanceState.SERVING))
        snapshot["pbhost_stub_restarts_total"].add(labels, supervisor.restarts)
        snapshot["pbhost_instance_busy_us_total"].add(labels, supervisor.busy_ns // 1000)
    if isinstance(model.scheduler, DynamicScheduler):
        for why, count in model.scheduler.closed.items():
            labels = labels_of({**dict(model.metrics.labels), "reason": why.value})
            snapshot["pbhost_batches_closed_total"].add(labels, count)


_LIFE_SECONDS = 0.5
_MEMORY_LIFE_SECONDS = 4.0


class OverviewCollector:
    """Collects the overview when asked, at most twice per second; memory more rarely.

    So any number of clients that ask again and again cost little. `model_control`: whether clients
    may load and unload models. `repository`: says how far models are fetched.
    """

    def __init__(
        self, name: str, registry: Registry, model_control: bool, repository: Repository
    ) -> None:
        self._name = name
        self._repository = repository
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
        fetch = self._repository.describe_fetch(qualified_name(namespace, name))
        reason = known.reason or fetch
        if model is None:
            return ModelOverview(name, namespace, number, known.state.value, reason)
        totals, tokens = model.metrics.totals(), model.metrics.token_latencies
        supervisors = model.supervisors if isinstance(model, PythonModel) else []
        return ModelOverview(
            name,
            namespace,
            number,
            known.state.value,
            reason,
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

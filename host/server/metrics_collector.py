"""Collects everything that a scrape of the metrics endpoint shows."""

from __future__ import annotations

import asyncio

from host.access.api_keys import ApiKeys
from host.cache.store import ResponseStore
from host.health.event_loop_watchdog import EventLoopWatchdog
from host.instances.pool import StubPool
from host.instances.supervisor import InstanceState
from host.metrics.catalogue import MetricsSnapshot
from host.metrics.custom import CustomMetrics
from host.metrics.family import MetricFamily, labels_of
from host.metrics.machine import MachineMetrics
from host.metrics.process import ProcessMetrics
from host.model_control.memory_budget import MemoryBudget
from host.model_control.on_demand import OnDemandLoads
from host.models.python_model import PythonModel
from host.models.registry import Registry
from host.scheduling.dynamic import DynamicScheduler
from host.traffic.splits import TrafficSplits

_CATCH_UP_TIMEOUT_S = 1.0  # seconds that a scrape waits for metric updates of stubs


class MetricsCollector:
    """Collects the server's numbers when asked, and those of the machine at intervals.

    `interval`: `--metrics-interval-ms` in seconds; the machine is measured twice as often.
    `pinned`: size of the memory pool that Triton would have, in bytes. `store`: the response cache.
    `on_demand`: the loads for requests. `memory_budget`: the memory of models, if it is limited.
    `on_demand`: the loads for requests. `api_keys`: the keys of clients.
    """

    def __init__(
        self,
        registry: Registry,
        pool: StubPool,
        custom: CustomMetrics,
        *,
        machine: MachineMetrics | None,
        process: ProcessMetrics,
        watchdog: EventLoopWatchdog,
        interval: float,
        pinned: int,
        store: ResponseStore | None = None,
        on_demand: OnDemandLoads | None = None,
        memory_budget: MemoryBudget | None = None,
        api_keys: ApiKeys | None = None,
        traffic: TrafficSplits,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._custom_metrics = custom
        self._machine = machine
        self._process = process
        self._watchdog = watchdog
        self._sample_interval = max(0.001, interval / 2)
        self._pinned_pool_bytes = pinned
        self._store = store
        self._on_demand = on_demand
        self._memory_budget = memory_budget
        self._api_keys = api_keys
        self._traffic = traffic
        self._timer: asyncio.TimerHandle | None = None
        if machine is not None:
            self._sample_machine(machine)

    def _sample_machine(self, machine: MachineMetrics) -> None:
        machine.sample()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._sample_interval, self._sample_machine, machine)

    async def collect_after_catch_up(self) -> list[MetricFamily]:
        """As `collect`, after all updates that stubs have sent so far."""
        await self._pool.catch_up(_CATCH_UP_TIMEOUT_S)
        return self.collect()

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
        self._process.collect_into(snapshot)
        if self._store is not None:
            self._store.collect_into(snapshot)
        if self._on_demand is not None:
            self._on_demand.collect_into(snapshot)
        if self._memory_budget is not None:
            self._memory_budget.collect_into(snapshot)
        self._traffic.collect_into(snapshot)
        if self._api_keys is not None:
            self._api_keys.collect_into(snapshot)
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

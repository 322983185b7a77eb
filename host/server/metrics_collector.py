"""All that a scrape of the metrics port shows, put together."""

from __future__ import annotations

import asyncio

from host.cache.store import Store
from host.instances.pool import StubPool
from host.instances.supervisor import LaneState
from host.metrics.catalogue import Sheet
from host.metrics.custom import CustomMetrics
from host.metrics.family import Family, labels_of
from host.metrics.machine import Machine
from host.models.python_model import PythonModel
from host.models.registry import Registry
from host.scheduling.dynamic import DynamicScheduler

_LATE_SECONDS = 1.0  # that a scrape waits for what a stub was just saying


class Scrape:
    """Reads the server's numbers when asked, and those of the machine at intervals.

    `interval` is that of `--metrics-interval-ms`, in seconds: measurements come twice as often.
    `pinned` is the size of a memory pool that Triton would have, in bytes. `store` is the response
    cache.
    """

    def __init__(
        self,
        registry: Registry,
        pool: StubPool,
        custom: CustomMetrics,
        *,
        machine: Machine | None,
        interval: float,
        pinned: int,
        store: Store | None = None,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._custom = custom
        self._machine = machine
        self._pause = max(0.001, interval / 2)
        self._pinned = pinned
        self._store = store
        self._timer: asyncio.TimerHandle | None = None
        if machine is not None:
            self._poll(machine)

    def _poll(self, machine: Machine) -> None:
        machine.poll()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pause, self._poll, machine)

    async def complete(self) -> list[Family]:
        """As `families`, also if stubs have said more than there was room for at a time."""
        await self._pool.catch_up(_LATE_SECONDS)
        return self.families()

    def families(self) -> list[Family]:
        """Everything as it is now; what stubs have said is taken in first."""
        self._pool.drain()
        sheet = Sheet()
        entries = [entry for _, entry in self._registry.items()]
        for model in [v.model for entry in entries for _, v in sorted(entry.versions.items())]:
            if model is not None:
                model.meter.fill(sheet)
            if isinstance(model, PythonModel):
                _fill_lanes(sheet, model)
        sheet["nv_pinned_memory_pool_total_bytes"].add((), self._pinned)
        sheet["nv_pinned_memory_pool_used_bytes"].add((), 0)
        if self._machine is not None:
            self._machine.fill(sheet)
        if self._store is not None:
            self._store.fill(sheet)
        arenas = self._pool.arenas
        for owner, taken in zip(("host", "stubs"), arenas.taken(), strict=True):
            sheet["pbhost_arena_used_bytes"].add((("owner", owner),), taken)
        sheet["pbhost_arena_limit_bytes"].add((), arenas.limit)
        return [*sheet.families(), *self._custom.collect()]

    def close(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()


def _fill_lanes(sheet: Sheet, model: PythonModel) -> None:
    for lane in model.lanes:
        labels = labels_of({**dict(model.meter.labels), "instance": lane.instance.name})
        sheet["pbhost_stub_up"].add(labels, int(lane.state is LaneState.SERVING))
        sheet["pbhost_stub_restarts_total"].add(labels, lane.restarts)
        sheet["pbhost_instance_busy_us_total"].add(labels, lane.busy_ns // 1000)
    if isinstance(model.scheduler, DynamicScheduler):
        for why, count in model.scheduler.closed.items():
            labels = labels_of({**dict(model.meter.labels), "reason": why.value})
            sheet["pbhost_batches_closed_total"].add(labels, count)

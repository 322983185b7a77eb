"""One version of a model that runs in stubs: validated, scheduled, counted."""

from __future__ import annotations

import asyncio
import time

from host.config.model_config import ModelConfig
from host.descriptions import ModelStatistics
from host.errors import HostError, unavailable
from host.inference import Call, InferRequest
from host.instances.batch import Batch, Times
from host.instances.supervisor import LaneState, Supervisor
from host.models.signature import Signature
from host.scheduling.direct import DirectScheduler
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.scheduler import Scheduler
from host.statistics import Counters


class PythonModel:
    """Ready once its lanes have joined; see the loader."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        self.name: str = config.name
        self.version = version
        self.config = config
        self.lanes: list[Supervisor] = []
        self.signature = Signature(config)
        self.scheduler = make_scheduler(config, self.signature)
        self._counters = Counters(self.name, str(version))
        self._calls: set[Call] = set()  # under way, queued ones included
        self._drained: asyncio.Event | None = None

    def infer(self, request: InferRequest) -> Call:
        """Start a request. Raises HostError if it is not valid, or nobody can run it."""
        self.signature.check(request)
        if not self.scheduler.lanes or self._drained is not None:
            self._refuse_if_hopeless(request)
        call = Call(request)
        call.queued_ns = call.received_ns
        call.on_finish = self._finished
        self._calls.add(call)
        self.scheduler.submit(call)
        return call

    @property
    def ready(self) -> bool:
        """Whether at least one instance is alive."""
        return any(lane.state is LaneState.SERVING for lane in self.lanes)

    def statistics(self) -> ModelStatistics:
        """What it has done so far."""
        return self._counters.snapshot()

    def report(self, batch: Batch, times: Times | None) -> None:
        """A batch has ended; without times, because its stub died; without calls, unsent."""
        if times is not None and batch.calls:
            self._counters.batch(batch.calls, times)

    async def drain(self) -> None:
        """Refuse new calls and wait until those under way have ended."""
        self._drained = asyncio.Event()
        if self._calls:
            await self._drained.wait()

    def abort(self, error: HostError) -> None:
        """End every call under way."""
        for call in list(self._calls):
            call.abandon(error)

    async def stop(self, grace: float, finalize: float) -> None:
        """End every lane; seconds as for `Instance.stop`."""
        self.scheduler.fail_queued(unavailable(f"model '{self.name}' is being unloaded"))
        await asyncio.gather(*(lane.stop(grace, finalize) for lane in self.lanes))

    @property
    def in_flight(self) -> int:
        """Calls under way, queued ones included."""
        return len(self._calls)

    def _finished(self, call: Call) -> None:
        self._calls.discard(call)
        if call.failed:
            self._counters.failure(time.monotonic_ns() - call.received_ns)
        if self._drained is not None and not self._calls:
            self._drained.set()

    def _refuse_if_hopeless(self, request: InferRequest) -> None:
        """A stub that is being replaced is worth waiting for; anything else is not."""
        if self._drained is not None:
            raise unavailable(
                f"[request id: {request.id or '<id_unknown>'}] Server is stopping, scheduler for"
                " model has stopped accepting new inference requests"
            )
        if not any(lane.state is LaneState.RESTARTING for lane in self.lanes):
            raise unavailable("; ".join(lane.reason for lane in self.lanes))


def make_scheduler(config: ModelConfig, signature: Signature) -> Scheduler:
    """The scheduler that the configuration asks for."""
    if config.WhichOneof("scheduling_choice") != "dynamic_batching":
        return DirectScheduler()
    delay = config.dynamic_batching.max_queue_delay_microseconds / 1e6
    return DynamicScheduler(config.max_batch_size, delay, signature.compatible)

"""Draining: a version stops once its calls have ended and no ensemble holds it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from host.cache.responses import CacheHit, ResponseCache
from host.crashes.quarantine import Quarantine
from host.errors import HostError, unavailable
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, copy_from_shared_memory
from host.metrics.model_metrics import ModelMetrics


class DrainableModel(ABC):
    """Counts calls in progress, queued ones included, and ensembles that hold the version."""

    name: str
    version: int
    metrics: ModelMetrics

    observes_responses: bool
    """Whether the first responses of calls are measured."""

    def __init__(self) -> None:
        self.cache: ResponseCache | None = None
        self.quarantine: Quarantine | None = None
        self._calls: set[Call] = set()
        self._holds = 0
        self._drained: asyncio.Event | None = None  # set once draining has started

    @property
    def in_flight(self) -> int:
        """Number of calls in progress, including queued ones."""
        return len(self._calls)

    @property
    def unfinished(self) -> int:
        """Number of calls in progress."""
        return len(self._calls)

    @property
    def in_use(self) -> bool:
        """Whether calls are in progress, or ensembles hold the version."""
        return bool(self._calls or self._holds)

    def acquire(self) -> None:
        """Holds the version for a request of an ensemble, which may call it later."""
        self._holds += 1

    def release(self) -> None:
        """Ends the hold of an ensemble's request."""
        self._holds -= 1
        self._signal_if_drained()

    async def drain(self, sequences: bool = False) -> None:
        """Refuses new calls, and waits until there are no calls and no holds.

        `sequences`: also until all open sequences have ended.
        """
        self._drained = asyncio.Event()
        if self._is_awaited():
            await self._drained.wait()

    def abort(self, error: HostError) -> None:
        """Ends every call in progress."""
        for call in list(self._calls):
            call.abort(error)

    def call_responded(self, call: Call, response: InferResponse) -> None:
        """Records the first response of a call."""
        latencies = self.metrics.latencies
        if latencies is not None and not call.responded:
            latencies.record_first_response(call)

    def repeat_cache_hit(self, hit: CacheHit) -> bool:
        """Counts a request that is equal to one that `hit` has answered, without a call.

        False if `infer` has to decide: the entry has gone, or responses need more than the cache.
        """
        return (
            self.cache is not None
            and self._drained is None
            and self.metrics.latencies is None
            and self.cache.repeat_hit(hit)
        )

    @abstractmethod
    def call_finished(self, call: Call) -> None:
        """Counts a call that has ended."""

    def _track_call(self, call: Call) -> None:
        """Counts a call that has been accepted."""
        call.listener = self
        self._calls.add(call)
        trace = call.request.trace
        if trace is not None:
            trace.start_inference(call.request, self.name, self.version, call.received_ns)

    def _raise_if_draining(self, request: InferRequest) -> None:
        if self._drained is not None and not self._holds:
            raise unavailable(
                f"[request id: {request.id or '<id_unknown>'}] Server is stopping, scheduler for"
                " model has stopped accepting new inference requests"
            )

    def _copy_inspected_inputs(self, request: InferRequest) -> None:
        """Copies inputs out of the client's shared memory if the host reads their content.

        The client may change its memory at any time. Without the copy, the content that the cache
        or the trace sees could differ from what the model gets. Raises HostError INTERNAL.
        """
        if self.cache is not None or (request.trace is not None and request.trace.includes_tensors):
            request.inputs = [copy_from_shared_memory(tensor) for tensor in request.inputs]

    def _release_call(self, call: Call) -> None:
        self._calls.discard(call)
        if self._drained is not None:
            self._signal_if_drained()

    def _is_awaited(self) -> bool:
        """Whether `drain` waits for calls or holds."""
        return bool(self._calls or self._holds)

    def _signal_if_drained(self) -> None:
        if self._drained is not None and not self._is_awaited():
            self._drained.set()

"""What a version of a model waits for before it is stopped: its calls, and whoever holds it."""

from __future__ import annotations

import asyncio

from host.cache.responses import ResponseCache
from host.errors import unavailable
from host.inference.request import Call, InferRequest, copy_from_shared_memory


class DrainableModel:
    """Calls under way, queued ones included, and ensembles whose requests may ask for more."""

    def __init__(self) -> None:
        self.cache: ResponseCache | None = None
        self._calls: set[Call] = set()
        self._holds = 0
        self._drained: asyncio.Event | None = None  # exists once draining has begun

    @property
    def in_flight(self) -> int:
        """Calls under way, queued ones included."""
        return len(self._calls)

    def acquire(self) -> None:
        """It is part of an ensemble's request, which may ask it later."""
        self._holds += 1

    def release(self) -> None:
        """An ensemble's request has ended."""
        self._holds -= 1
        self._signal_if_drained()

    async def drain(self) -> None:
        """Refuse new calls, and wait until those under way have ended and nobody holds it."""
        self._drained = asyncio.Event()
        if self._calls or self._holds:
            await self._drained.wait()

    def _raise_if_draining(self, request: InferRequest) -> None:
        if self._drained is not None and not self._holds:
            raise unavailable(
                f"[request id: {request.id or '<id_unknown>'}] Server is stopping, scheduler for"
                " model has stopped accepting new inference requests"
            )

    def _copy_inspected_inputs(self, request: InferRequest) -> None:
        """Copy inputs out of a client's memory if the host will look at what is in them.

        What it looks at must be what is run: a client that changed its memory in between would have
        others get the answers to its own questions, from the cache. Raises HostError INTERNAL.
        """
        if self.cache is not None or (request.trace is not None and request.trace.includes_tensors):
            request.inputs = [copy_from_shared_memory(tensor) for tensor in request.inputs]

    def _release_call(self, call: Call) -> None:
        self._calls.discard(call)
        self._signal_if_drained()

    def _signal_if_drained(self) -> None:
        if self._drained is not None and not self._calls and not self._holds:
            self._drained.set()

"""The response cache as one model version sees it: looked at before a request is queued."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from host.cache.key import key_of, printed
from host.cache.store import Outputs, Store
from host.errors import ErrorCode, HostError
from host.inference.request import Call, InferResponse, Tensor
from host.metrics.statistics import Counters

_log = logging.getLogger("pbhost")


Deliver = Callable[[Mapping[str, object], list[Tensor]], HostError | None]
"""Writes outputs to where the client wants them; what stands against it."""


class ResponseCache:
    """Answers calls from a store, and has the store keep what the model answers to the others.

    `version` and `namespace` are the model's; its `counters` learn of hits and misses
    (configuration spec 7.2).
    """

    def __init__(
        self,
        store: Store,
        version: int,
        counters: Counters,
        deliver: Deliver,
        namespace: str = "",
    ) -> None:
        self._namespace = namespace
        self._store = store
        self._version = version
        self._counters = counters
        self._deliver_to = deliver

    def serve(self, call: Call, run: Callable[[Call], None]) -> None:
        """Answer the call, at once or later, or have it `run`; no client can change its inputs."""
        begun = time.monotonic_ns()
        request = call.request
        slots, request.slots = request.slots, None
        request.offers = None
        visit = _Visit(call, begun, key_of(request, self._version, self._namespace), slots)
        self._store.look_up(visit.key, partial(self._found, visit, run))

    def _found(self, visit: _Visit, run: Callable[[Call], None], outputs: Outputs | None) -> None:
        call = visit.call
        if call.finished or call.cancelled:
            return
        now = time.monotonic_ns()
        visit.lookup_ns = now - visit.begun
        if outputs is None:
            call.on_response = partial(self._answered, visit)
            run(call)
            return
        request = call.request
        # New ones: those who pass tensors on put them into memory of their own.
        fresh = [Tensor(o.name, o.datatype, list(o.shape), o.data) for o in outputs]
        response = InferResponse(request.model_name, self._version, request.id, fresh)
        response.error = self._deliver(visit, response)
        if response.error is None:
            waited = visit.begun - call.queued_ns
            self._counters.cache_hit(now - call.received_ns, max(0, waited), visit.lookup_ns)
        call.respond(response)

    def _answered(self, visit: _Visit, response: InferResponse) -> None:
        """The model has answered. A failure is not kept."""
        if response.error is None:
            outputs = [
                Tensor(o.name, o.datatype, list(o.shape), bytes(o.data)) for o in response.outputs
            ]
            begun = time.monotonic_ns()
            self._store.insert(visit.key, outputs, partial(self._kept, visit, begun))
            response.error = self._deliver(visit, response)
            visit.call.failed = response.error is not None

    def _kept(self, visit: _Visit, begun: int, error: HostError | None) -> None:
        if error is not None:
            if error.code is ErrorCode.ALREADY_EXISTS:
                return  # the same request had been under way
            _log.error(
                "Failed to insert key [%s] into response cache: %s",
                printed(visit.key), error.message,
            )  # fmt: skip
        self._counters.cache_miss(visit.lookup_ns + time.monotonic_ns() - begun)

    def _deliver(self, visit: _Visit, response: InferResponse) -> HostError | None:
        if not visit.slots:
            return None
        return self._deliver_to(visit.slots, response.outputs)


@dataclass(slots=True)
class _Visit:
    """One call that came by the cache, at a time of CLOCK_MONOTONIC in nanoseconds."""

    call: Call
    begun: int
    key: bytes
    slots: Mapping[str, object] | None
    lookup_ns: int = 0

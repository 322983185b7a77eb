"""The response cache of one model version: the keys of requests, and look-ups before a queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from host.errors import ErrorCode, HostError
from host.inference.call import Call, CallListener
from host.inference.request import InferRequest, InferResponse, Tensor, digest_request
from host.metrics.families import MetricsSnapshot
from host.metrics.statistics import InferenceCounters
from host.repository.repository import qualified_name

CachedOutputs = Sequence[Tensor]
"""The outputs of a response; the `data` of the tensors are `bytes`."""

LookupCallback = Callable[[CachedOutputs | None], None]
InsertCallback = Callable[[HostError | None], None]


class ResponseStore(Protocol):
    """Stores outputs by key. All methods must be called on the event loop; none blocks."""

    def look_up(self, key: bytes, on_found: LookupCallback) -> None:
        """Calls `on_found`, at once or later, with the outputs of the key, or None.

        A failure is logged and counts as not found.
        """

    def repeat_hit(self, key: bytes, outputs: CachedOutputs) -> bool:
        """Looks up a key that was found before, at once; whether it still has the same outputs.

        Nothing is counted if it has not: `look_up` follows. A store that has to wait returns False.
        """

    def insert(self, key: bytes, outputs: CachedOutputs, on_inserted: InsertCallback) -> None:
        """Stores outputs, which must no longer change, unless the key exists.

        Calls `on_inserted`, at once or later, with None or the error: ALREADY_EXISTS if the key
        exists.
        """

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the metrics of the store to the snapshot."""

    async def close(self) -> None:
        """Cancels pending operations and releases resources."""


def request_key(request: InferRequest, version: int, namespace: str = "") -> bytes:
    """Computes the key of a validated request to a version of its model, `DIGEST_SIZE` bytes.

    The key depends on the model, its version, the name, data type, shape and bytes of every input,
    and the names of the requested outputs. It does not depend on the order of inputs and outputs,
    nor on anything else, such as the request id, parameters or the priority.
    """
    model = qualified_name(namespace, request.model_name)
    return digest_request(request, (model.encode(), str(version).encode()))


def format_key(key: bytes) -> str:
    """The key as a decimal number, for the log."""
    return str(int.from_bytes(key, "little"))


_log = logging.getLogger("pbhost")


class ResponseCache:
    """Answers requests from a store, and inserts the model's responses to all others.

    `version` and `namespace` identify the model. `deliver` writes outputs to the client's shared
    memory; it returns the error if that fails. Hits and misses are counted in `counters`
    (docs/reference/configuration-and-scheduling.md, "Response cache").
    """

    def __init__(
        self,
        store: ResponseStore,
        version: int,
        counters: InferenceCounters,
        deliver: Callable[[Mapping[str, object], list[Tensor]], HostError | None],
        namespace: str = "",
    ) -> None:
        self._namespace = namespace
        self._store = store
        self._version = version
        self._counters = counters
        self._write_to_client_memory = deliver

    def serve(self, call: Call, run: Callable[[Call], None]) -> None:
        """Looks the call up; answers it from the store or runs `run`, at once or later.

        The inputs must not be in memory that the client can change.
        """
        started_ns = time.monotonic_ns()
        request = call.request
        output_placement, request.output_placement = request.output_placement, None
        request.output_placement_hints = None
        cached = _CachedCall(
            call,
            started_ns,
            request_key(request, self._version, self._namespace),
            output_placement,
            self,
        )
        self._store.look_up(cached.key, partial(self._on_lookup, cached, run))

    def _on_lookup(
        self, cached: _CachedCall, run: Callable[[Call], None], outputs: CachedOutputs | None
    ) -> None:
        call = cached.call
        if call.ended:
            return
        now = time.monotonic_ns()
        cached.lookup_ns = now - cached.started_ns
        if outputs is None:
            cached.listener, call.listener = call.listener, cached
            run(call)
            return
        request = call.request
        # The store keeps its tensors: users of a response may replace the data of a tensor.
        fresh = [Tensor(o.name, o.datatype, list(o.shape), o.data) for o in outputs]
        response = InferResponse(request.model_name, self._version, request.id, fresh)
        response.error = self._write_outputs(cached, response)
        if response.error is None:
            if not cached.output_placement:
                response.cache_hit = CacheHit(self, cached.key, outputs)
            waited = cached.started_ns - call.queued_ns
            self._counters.record_cache_hit(
                now - call.received_ns, max(0, waited), cached.lookup_ns
            )
        call.respond(response)

    def repeat_hit(self, hit: CacheHit) -> bool:
        """Counts a request that is equal to one that `hit` has answered, and gets the same outputs.

        Returns False, and counts nothing, if the outputs are no longer in the store.
        """
        started_ns = time.monotonic_ns()
        if hit.cache is not self or not self._store.repeat_hit(hit.key, hit.outputs):
            return False
        elapsed = time.monotonic_ns() - started_ns
        self._counters.record_cache_hit(elapsed, 0, elapsed)
        return True

    def store_response(self, cached: _CachedCall, response: InferResponse) -> None:
        """Inserts the model's response into the store, unless it is an error."""
        if response.error is None:
            outputs = [
                Tensor(o.name, o.datatype, list(o.shape), bytes(o.data)) for o in response.outputs
            ]
            started_ns = time.monotonic_ns()
            self._store.insert(cached.key, outputs, partial(self._on_inserted, cached, started_ns))
            response.error = self._write_outputs(cached, response)
            cached.call.failed = response.error is not None

    def _on_inserted(self, cached: _CachedCall, started_ns: int, error: HostError | None) -> None:
        if error is not None:
            if error.code is ErrorCode.ALREADY_EXISTS:
                return  # another request with the same key finished first
            _log.error(
                "Failed to insert key [%s] into response cache: %s",
                format_key(cached.key), error.message,
            )  # fmt: skip
        self._counters.record_cache_miss(cached.lookup_ns + time.monotonic_ns() - started_ns)

    def _write_outputs(self, cached: _CachedCall, response: InferResponse) -> HostError | None:
        if not cached.output_placement:
            return None
        return self._write_to_client_memory(cached.output_placement, response.outputs)


@dataclass(slots=True)
class CacheHit:
    """An entry of the store that has answered a request to the model of `cache`."""

    cache: ResponseCache
    key: bytes
    outputs: CachedOutputs


@dataclass(slots=True)
class _CachedCall:
    """A call that uses the cache. `started_ns` is a CLOCK_MONOTONIC time."""

    call: Call
    started_ns: int
    key: bytes
    output_placement: Mapping[str, object] | None
    cache: ResponseCache
    lookup_ns: int = 0
    listener: CallListener | None = None
    observes_responses: bool = True

    def call_responded(self, call: Call, response: InferResponse) -> None:
        """Stores the response."""
        self.cache.store_response(self, response)
        if self.listener is not None and self.listener.observes_responses:
            self.listener.call_responded(call, response)

    def call_finished(self, call: Call) -> None:
        """Tells the model."""
        if self.listener is not None:
            self.listener.call_finished(call)

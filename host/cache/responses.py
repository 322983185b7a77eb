"""The response cache of one model version, and the store `local`, an LRU cache in this process."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from host.errors import ErrorCode, HostError, internal, invalid_argument
from host.inference.call import Call, CallListener
from host.inference.request import InferRequest, InferResponse, Tensor, digest_request
from host.metrics.families import MetricsSnapshot
from host.metrics.statistics import InferenceCounters
from host.repository.repository import qualified_name
from host.system.resources import SizeOutOfBound, read_byte_size

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


_OVERHEAD_BYTES = 256  # estimated bytes of a tensor besides its data


class LocalStore:
    """Holds at most `size` bytes for all models together
    (docs/reference/configuration-and-scheduling.md, "Response cache").
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        # Least recently used first.
        self._entries: OrderedDict[bytes, tuple[CachedOutputs, int]] = OrderedDict()
        self._lookups = self._hits = self._evictions = 0
        self._lookup_ns = self._insertion_ns = 0

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> LocalStore:
        """Creates a store from `--cache-config=local,size=<bytes>`. Raises HostError."""
        size = settings.get("size", "")
        if not size:
            raise _invalid_setting("config didn't contain a valid 'size' field.")
        try:
            size_bytes = read_byte_size(size)
        except SizeOutOfBound as error:
            raise _invalid_setting(f"'size' is {size}, but {error}") from None
        except ValueError:
            raise _invalid_setting("'size' config must be a string or uint type") from None
        if not size_bytes:
            raise _invalid_setting(
                "'size' must be greater than 0 bytes; without --cache-config, there is no cache"
            )
        return cls(size_bytes)

    def look_up(self, key: bytes, on_found: LookupCallback) -> None:
        """Calls `on_found` before returning. A hit becomes the most recently used entry."""
        started_ns = time.monotonic_ns()
        entry = self._entries.get(key)
        self._lookups += 1
        if entry is not None:
            self._hits += 1
            self._entries.move_to_end(key)
        self._lookup_ns += time.monotonic_ns() - started_ns
        on_found(None if entry is None else entry[0])

    def repeat_hit(self, key: bytes, outputs: CachedOutputs) -> bool:
        """Counts a hit of the same outputs; False if they have been evicted."""
        started_ns = time.monotonic_ns()
        entry = self._entries.get(key)
        if entry is None or entry[0] is not outputs:
            return False
        self._lookups += 1
        self._hits += 1
        self._entries.move_to_end(key)
        self._lookup_ns += time.monotonic_ns() - started_ns
        return True

    def insert(self, key: bytes, outputs: CachedOutputs, on_inserted: InsertCallback) -> None:
        """Evicts entries until the outputs fit, and stores them.

        Calls `on_inserted` before returning.
        """
        started_ns = time.monotonic_ns()
        error = self._insert(key, outputs)
        self._insertion_ns += time.monotonic_ns() - started_ns
        on_inserted(error)

    def _insert(self, key: bytes, outputs: CachedOutputs) -> HostError | None:
        if key in self._entries:
            return HostError(ErrorCode.ALREADY_EXISTS, "the key is already in the cache")
        size = sum(len(output.data) + _OVERHEAD_BYTES for output in outputs) + _OVERHEAD_BYTES
        if size > self._size:
            return internal(
                f"Requested byte_size: {size} is greater than total cache size: {self._size}"
            )
        while self._used + size > self._size:
            _, (_, freed) = self._entries.popitem(last=False)
            self._used -= freed
            self._evictions += 1
        self._entries[key] = outputs, size
        self._used += size
        return None

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the metrics of the whole cache to the snapshot."""
        for name, value in (
            ("nv_cache_util", self._used / self._size if self._size else 0.0),
            ("nv_cache_num_entries", len(self._entries)),
            ("nv_cache_num_hits", self._hits),
            ("nv_cache_num_misses", self._lookups - self._hits),
            ("nv_cache_num_lookups", self._lookups),
            ("nv_cache_num_evictions", self._evictions),
            ("nv_cache_lookup_duration", self._lookup_ns // 1000),
            ("nv_cache_insertion_duration", self._insertion_ns // 1000),
        ):
            snapshot[name].add((), value)

    async def close(self) -> None:
        """Removes all entries."""
        self._entries.clear()
        self._used = 0


def _invalid_setting(what: str) -> HostError:
    return invalid_argument(f"Failed to initialize LocalCache: {what}")


async def open_store(name: str, settings: Mapping[str, str], directory: str) -> ResponseStore:
    """Opens the cache `name`: `local` or `redis`.

    `directory` is `--cache-directory`, which only the error for an unknown name shows. Raises
    HostError INVALID_ARG for an unknown name or setting, UNAVAILABLE without a Redis server.
    """
    if name == "local":
        return LocalStore.from_settings(settings)
    if name == "redis":
        try:
            from host.cache.redis_store import RedisSettings, RedisStore
        except ModuleNotFoundError as error:
            raise invalid_argument(
                f"--cache-config=redis needs the Python package '{error.name}':"
                " pip install 'pbhost[redis]'"
            ) from None
        return await RedisStore(RedisSettings.from_settings(settings)).connect()
    raise invalid_argument(
        f"unable to find 'libtritoncache_{name}.so' for cache. Searched: {directory}"
    )

"""The cache `local`, an LRU cache in the memory of the host, and the choice of a store."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping

from host.cache.responses import CachedOutputs, InsertCallback, LookupCallback, ResponseStore
from host.errors import ErrorCode, HostError, internal, invalid_argument
from host.metrics.families import MetricsSnapshot
from host.system.resources import SizeOutOfBound, read_byte_size

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

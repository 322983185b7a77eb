"""The cache `redis`: a Redis server, which several hosts may share."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from host.cache.responses import CachedOutputs, InsertCallback, LookupCallback, format_key
from host.errors import ErrorCode, HostError, invalid_argument, unavailable
from host.inference.request import Tensor
from host.metrics.families import MetricsSnapshot

_log = logging.getLogger("pbhost")

_PREFIX = b"pbhost:response:"
_BACK_OFF_SECONDS = 1.0  # how long a server is not used after a failure
_FAILURES = (RedisError, OSError, asyncio.TimeoutError)

_EncodedOutputs = list[tuple[str, str, list[int], bytes]]


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The settings of `--cache-config=redis,...`, with the names of Triton's Redis cache.

    Timeouts are in milliseconds. `pool_size` is the maximum number of connections.
    """

    host: str
    port: int
    user: str = ""
    password: str = ""
    db: int = 0
    connect_timeout: int = 1000
    socket_timeout: int = 1000
    pool_size: int = 8
    wait_timeout: int = 1000
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> RedisSettings:
        """Parses the settings of the command line. Raises HostError INVALID_ARG."""
        read: dict[str, Any] = {
            "user": os.environ.get("TRITONCACHE_REDIS_USERNAME", ""),
            "password": os.environ.get("TRITONCACHE_REDIS_PASSWORD", ""),
        }
        for name, text in settings.items():
            if name not in cls.__slots__:
                known = ", ".join(cls.__slots__)
                raise _invalid_setting(f"there is no setting '{name}'; there are {known}")
            kind = cls.__annotations__[name]
            if kind == "int" and not (text.isascii() and text.isdecimal()):
                raise _invalid_setting(f"setting '{name}' must be a whole number, got '{text}'")
            if kind == "bool" and text not in ("yes", "no"):
                raise _invalid_setting(f"setting '{name}' must be yes or no, got '{text}'")
            read[name] = int(text) if kind == "int" else text == "yes" if kind == "bool" else text
        for name in ("host", "port"):
            if not read.get(name):
                raise _invalid_setting(
                    f"setting '{name}' is missing, as in 'redis,host=localhost,port=6379'"
                )
        return cls(**read)

    def create_client(self) -> aioredis.Redis:
        """Creates a client of the server. It connects when it is first used."""
        options: dict[str, Any] = {}
        if self.tls_enabled:
            options = {
                "connection_class": aioredis.SSLConnection,
                "ssl_certfile": self.cert or None,
                "ssl_keyfile": self.key or None,
                "ssl_ca_certs": self.cacert or None,
                "ssl_ca_path": self.cacert_dir or None,
            }
        pool = aioredis.BlockingConnectionPool(
            host=self.host,
            port=self.port,
            db=self.db,
            username=self.user or None,
            password=self.password or None,
            socket_connect_timeout=max(1, self.connect_timeout) / 1000,
            socket_timeout=max(1, self.socket_timeout) / 1000,
            max_connections=max(1, self.pool_size),
            timeout=max(1, self.wait_timeout) / 1000,
            **options,
        )
        return aioredis.Redis(connection_pool=pool)


class RedisStore:
    """Stores responses in a Redis server.

    A request waits at most for the configured timeouts. After a failure, the server is not used for
    one second; lookups find nothing and inserts fail in that time.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._address = f"{settings.host}:{settings.port}"
        self._client = settings.create_client()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._back_off_until = 0.0

    async def connect(self) -> RedisStore:
        """Checks the connection. Raises HostError UNAVAILABLE."""
        try:
            await self._client.ping()
        except _FAILURES as error:
            await self._client.aclose(close_connection_pool=True)
            raise unavailable(
                f"Failed to initialize RedisCache: no Redis server at {self._address}: {error}"
            ) from error
        return self

    def look_up(self, key: bytes, on_found: LookupCallback) -> None:
        """Looks up a key in the server, then calls `on_found`."""
        if self._backing_off:
            on_found(None)
        else:
            self._create_task(self._look_up(key, on_found))

    async def _look_up(self, key: bytes, on_found: LookupCallback) -> None:
        outputs: CachedOutputs | None = None
        try:
            data = await self._client.get(_PREFIX + key)
            if isinstance(data, bytes):  # the client is set up to return bytes
                outputs = _decode(data)
        except msgspec.DecodeError as error:
            _log.error("response cache: the entry of key [%s] is not a valid response: %s",
                       format_key(key), error)  # fmt: skip
        except _FAILURES as error:
            self._back_off("Failed to look up", key, error)
        on_found(outputs)

    def repeat_hit(self, key: bytes, outputs: CachedOutputs) -> bool:
        """Returns False: only the server knows whether it still has the entry."""
        return False

    def insert(self, key: bytes, outputs: CachedOutputs, on_inserted: InsertCallback) -> None:
        """Sends the outputs to the server, then calls `on_inserted`."""
        if self._backing_off:
            on_inserted(
                unavailable(f"the Redis server at {self._address} failed less than a second ago")
            )
        else:
            self._create_task(self._insert(key, _encode(outputs), on_inserted))

    async def _insert(self, key: bytes, data: bytes, on_inserted: InsertCallback) -> None:
        error: HostError | None = None
        try:
            if not await self._client.set(_PREFIX + key, data, nx=True):
                error = HostError(ErrorCode.ALREADY_EXISTS, "the key is already in the cache")
        except _FAILURES as failure:
            self._back_off("Failed to insert", key, failure)
            error = unavailable(str(failure))
        on_inserted(error)

    @property
    def _backing_off(self) -> bool:
        return self._loop.time() < self._back_off_until

    def _back_off(self, what: str, key: bytes, error: Exception) -> None:
        if not self._backing_off:
            _log.warning(
                "%s key [%s]: the Redis server at %s is not used for %g s: %s",
                what, format_key(key), self._address, _BACK_OFF_SECONDS, error,
            )  # fmt: skip
        self._back_off_until = self._loop.time() + _BACK_OFF_SECONDS

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Does nothing: a Redis server exports its own metrics."""

    async def close(self) -> None:
        """Disconnects. The entries stay in the server."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._client.aclose(close_connection_pool=True)


def _encode(outputs: CachedOutputs) -> bytes:
    wire = [(o.name, o.datatype, o.shape, o.data) for o in outputs]
    return msgspec.msgpack.encode(wire)


def _decode(data: bytes) -> CachedOutputs:
    return [Tensor(*fields) for fields in msgspec.msgpack.decode(data, type=_EncodedOutputs)]


def _invalid_setting(what: str) -> HostError:
    return invalid_argument(f"Failed to initialize RedisCache: {what}")

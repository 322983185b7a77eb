"""Opens the cache that `--cache-config` selects."""

from __future__ import annotations

from collections.abc import Mapping

from host.cache.local import LocalStore
from host.cache.store import ResponseStore
from host.errors import invalid_argument


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

"""The connections to the replicas of one deployment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from host.errors import HostError
from host.ray.per_model.channel import Channel
from host.ray.per_model.channel_server import ChannelAddress

_log = logging.getLogger("pbhost")

_FRESH_SECONDS = 2.0


class ChannelPool:
    """Connects to replicas as Ray knows them, again every two seconds while requests come.

    `list_addresses`: asks all replicas for their addresses; None for one without a port. Belongs to
    one event loop.
    """

    def __init__(
        self, list_addresses: Callable[[], Awaitable[Sequence[ChannelAddress | None]]]
    ) -> None:
        self._list_addresses = list_addresses
        self._channels: dict[ChannelAddress, Channel] = {}
        self._refreshed = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    def choose(self) -> Channel | None:
        """The connection with the fewest requests in progress; None if there is none now.

        Never waits: the first request finds none.
        """
        now = time.monotonic()
        if self._refreshing is None and now - self._refreshed > _FRESH_SECONDS:
            self._refreshed = now
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(self._refresh_ended)
        accepting = [channel for channel in self._channels.values() if channel.accepts]
        return min(accepting, key=lambda channel: channel.in_progress, default=None)

    async def _refresh(self) -> None:
        try:
            found = {one for one in await self._list_addresses() if one is not None}
        except (RayError, RayServeException, HostError, TimeoutError, asyncio.TimeoutError) as e:
            _log.debug("the addresses of replicas did not come: %s", e)  # handles say what is wrong
            return
        for address, channel in list(self._channels.items()):
            if not channel.in_progress and (address not in found or not channel.accepts):
                channel.close()
                del self._channels[address]
        await asyncio.gather(*map(self._connect, found - self._channels.keys()))

    def _refresh_ended(self, task: asyncio.Future[None]) -> None:
        self._refreshing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the connections to replicas are not known", exc_info=error)

    async def _connect(self, address: ChannelAddress) -> None:
        try:
            self._channels[address] = await Channel.connect(address)
        except OSError as error:
            _log.warning(
                "no connection to the replica at %s:%d, requests to it go through Ray: %s",
                address.host, address.port, error,
            )  # fmt: skip

    def close(self) -> None:
        """Closes all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        for channel in self._channels.values():
            channel.close()

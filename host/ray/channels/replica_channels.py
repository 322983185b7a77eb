"""The connections to the replicas of one deployment.

Ray says which replicas there are. Requests and calls by a connection need no slot of
`max_ongoing_requests`, so a replica whose slots are all taken still answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from host.errors import unavailable
from host.ray.channels.channel import CallError, Channel, ChannelLostError, NotTakenError
from host.ray.channels.channel_server import ChannelAddress, ChannelServer

_log = logging.getLogger("pbhost")

_REFRESH_SECONDS = 2.0
_SLOT_SECONDS = 1.0
"""How long a replica may take to give its address; then its slots are taken."""


async def broadcast(
    handle: DeploymentHandle, method: str, *arguments: Any, timeout: float
) -> list[Any]:
    """Calls a method of all replicas of a deployment through Ray Serve.

    Returns the results of those that live; an empty list while Ray knows of none. Raises
    TimeoutError after `timeout` seconds, and the first error of a method.
    """
    try:
        answers = await handle.broadcast(method, *arguments).results_async(
            timeout_s=timeout, return_exceptions=True
        )
    except RayServeException as error:  # no replica has been ready yet
        _log.debug("no replica to call %s of: %s", method, error)
        return []
    results = []
    for answer in answers:
        if isinstance(answer, RayActorError):
            continue  # it has died, and Ray replaces it
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results


class ReplicaChannels:
    """Connects to the replicas of a deployment when they are needed. Belongs to one event loop.

    `get_handle`: returns the handle of the deployment. `own`: the server of this replica and its
    address, if it is one of them.
    """

    def __init__(
        self,
        get_handle: Callable[[], DeploymentHandle],
        own: tuple[ChannelServer, ChannelAddress | None] | None = None,
    ) -> None:
        self._get_handle = get_handle
        self._own = None if own is None else own[0]
        self._own_address = None if own is None else own[1]
        self._known: set[ChannelAddress | None] = set() if own is None else {own[1]}
        self._channels: dict[ChannelAddress, Channel] = {}
        self._connecting: dict[ChannelAddress, asyncio.Task[Channel]] = {}
        self._refreshed = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    def learn(self, address: ChannelAddress | None) -> None:
        """Another replica of the deployment has told its address; None if it has no port."""
        self._known.add(address)

    def choose(self) -> Channel | None:
        """The connection with the fewest requests in progress; None if there is none now.

        Never waits: the first request finds none. While requests come, it asks Ray for the replicas
        again every two seconds.
        """
        now = time.monotonic()
        if self._refreshing is None and now - self._refreshed > _REFRESH_SECONDS:
            self._refreshed = now
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(self._refresh_ended)
        accepting = [channel for channel in self._channels.values() if channel.accepts]
        return min(accepting, key=lambda channel: channel.in_progress, default=None)

    async def call_all(self, method: str, *arguments: Any, timeout: float) -> list[Any]:
        """Calls a method of all replicas.

        Returns the results of those that live; an empty list while Ray knows of none. Raises
        TimeoutError after `timeout` seconds, HostError UNAVAILABLE for a replica that cannot be
        reached or whose method fails, and what Ray raises.
        """
        try:
            found = await self._ask_addresses(min(timeout, _SLOT_SECONDS))
        except TimeoutError:
            if not self._known:
                raise
            found = self._known  # some replica has no free slot to say its address
        if None in found:
            return await broadcast(self._get_handle(), method, *arguments, timeout=timeout)
        calls = [self._call(address, method, arguments) for address in found if address]
        try:
            parts = await asyncio.wait_for(asyncio.gather(*calls), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"'{method}' was not answered within {timeout:g} s") from None
        return [result for part in parts for result in part]

    async def call_one(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Calls a method of one replica. Raises as `call_all`."""
        while (channel := self.choose()) is not None:
            try:
                return await asyncio.wait_for(channel.call(method, *arguments), timeout)
            except NotTakenError:
                continue  # it has gone, and accepts no more
            except ChannelLostError:
                raise unavailable("the replica that answered has died") from None
            except CallError as error:
                raise unavailable(f"a replica failed to answer '{method}': {error}") from None
            except asyncio.TimeoutError:
                raise TimeoutError(f"'{method}' was not answered in {timeout:g} s") from None
        response = getattr(self._get_handle(), method).remote(*arguments)
        return await asyncio.wait_for(response, timeout)

    async def _ask_addresses(self, timeout: float) -> set[ChannelAddress | None]:
        """Raises TimeoutError, and what Ray raises."""
        handle = self._get_handle()
        found = set(await broadcast(handle, "exchange_address", self._own_address, timeout=timeout))
        for address, channel in list(self._channels.items()):
            if not channel.in_progress and (address not in found or not channel.accepts):
                channel.close()
                del self._channels[address]
        self._known = found
        return found

    async def _call(
        self, address: ChannelAddress, method: str, arguments: tuple[Any, ...]
    ) -> list[Any]:
        """A list of the result; an empty one if the replica has died."""
        if self._own is not None and address == self._own_address:
            return [await self._own.methods[method](*arguments)]
        try:
            channel = await self._connect(address)
            return [await channel.call(method, *arguments)]
        except (ConnectionRefusedError, ChannelLostError, NotTakenError):
            self._known.discard(address)
            return []
        except OSError as error:
            raise unavailable(
                f"the replica at {address.host}:{address.port} cannot be reached: {error}"
            ) from error
        except CallError as error:
            raise unavailable(f"a replica failed to answer '{method}': {error}") from None

    async def _connect(self, address: ChannelAddress) -> Channel:
        """The connection, also for others that ask at the same time. Raises OSError."""
        channel = self._channels.get(address)
        if channel is not None and channel.accepts:
            return channel
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.get_running_loop().create_task(Channel.connect(address))
            self._connecting[address] = task
            task.add_done_callback(lambda _: self._connecting.pop(address))
        await asyncio.wait([task])
        self._channels[address] = task.result()
        return self._channels[address]

    async def _refresh(self) -> None:
        try:
            found = await self._ask_addresses(_SLOT_SECONDS)
        except (RayError, RayServeException, TimeoutError) as error:
            _log.debug("the addresses of replicas did not come: %s", error)  # handles say why
            found = self._known
        connections = await asyncio.gather(
            *(self._connect(one) for one in found if one is not None), return_exceptions=True
        )
        _log_failures(connections)

    def _refresh_ended(self, task: asyncio.Future[None]) -> None:
        self._refreshing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the connections to replicas are not known", exc_info=error)

    def close(self) -> None:
        """Closes all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        for channel in self._channels.values():
            channel.close()


def _log_failures(connections: Iterable[Channel | BaseException]) -> None:
    for one in connections:
        if isinstance(one, OSError):
            _log.warning("no connection to a replica, requests go through Ray: %s", one)
        elif isinstance(one, BaseException):
            raise one

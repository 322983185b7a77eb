"""The connections to the replicas of one deployment.

Ray says which replicas there are. Requests and calls by a connection need no slot of
`max_ongoing_requests`, so a replica whose slots are all taken still answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from host.errors import unavailable
from host.ray.channel_client import Channel, ChannelLostError, NotTakenError
from host.ray.channel_messages import ReplicaMethod, checked
from host.ray.channel_server import ChannelAddress, ChannelServer

_STATUS_SECONDS = 5.0
_ANSWERING = ("RUNNING", "UPDATING", "PENDING_MIGRATION")


class ServeStatusReader:
    """Asks Ray Serve for its status, once at a time in this process.

    A question costs CPU time for each deployment, in this process and in the controller. It does
    not end when its caller gives up, so that many of them would keep a busy machine from answering.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: Future[Any] | None = None

    async def read(self) -> Any:
        """The status, which callers at the same time share.

        Raises RayError, RayServeException, and TimeoutError.
        """
        with self._lock:
            if self._answer is None or self._answer.done():
                self._answer = Future()
                threading.Thread(target=self._run, args=[self._answer], daemon=True).start()
            answer = asyncio.wrap_future(self._answer)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), _STATUS_SECONDS)
        except asyncio.TimeoutError:
            raise TimeoutError(f"no status of Ray Serve within {_STATUS_SECONDS:g} s") from None

    def _run(self, answer: Future[Any]) -> None:
        try:
            answer.set_result(self._ask())
        except BaseException as error:  # of any kind: the callers get it
            answer.set_exception(error)


def _ask_ray() -> Any:
    return serve.status()


_status = ServeStatusReader(_ask_ray)


async def count_replicas(handle: DeploymentHandle) -> int:
    """How many replicas of a deployment answer requests, as Ray knows it.

    Raises as `ServeStatusReader.read`.
    """
    status = await _status.read()
    application = status.applications.get(handle.app_name)
    deployment = application and application.deployments.get(handle.deployment_name)
    if not deployment:
        return 0
    states = {str(getattr(key, "value", key)): n for key, n in deployment.replica_states.items()}
    return sum(states.get(state, 0) for state in _ANSWERING)


_log = logging.getLogger("pbhost")

_Result = TypeVar("_Result")

_REFRESH_SECONDS = 2.0
_MAX_REFRESH_SECONDS = 60.0
_ATTEMPTS = 2
"""Connections on which a call is tried that a replica has not taken."""
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
        self.counted = own is None
        """Whether Ray counts this replica, if it is one of them: it has started."""
        self._channels: dict[ChannelAddress, Channel] = {}
        self._connecting: dict[ChannelAddress, asyncio.Task[Channel]] = {}
        self._refreshed = float("-inf")
        self._pause = _REFRESH_SECONDS
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    def learn(self, address: ChannelAddress | None) -> None:
        """Another replica of the deployment has told its address; None if it has no port."""
        self._known.add(address)

    def choose(self) -> Channel | None:
        """One of the connections with the fewest requests in progress; None if there is none now.

        A random one, as other callers do not see these requests and would choose the same.
        Never waits: the first request finds none. While requests arrive, it asks Ray for the
        replicas again every two seconds; less often while one has no free slot, as questions wait
        there.
        """
        if self._closed:
            return None
        now = time.monotonic()
        if self._refreshing is None and now - self._refreshed > self._pause:
            self._refreshed = now
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(self._refresh_ended)
        accepting = [channel for channel in self._channels.values() if channel.accepts]
        if not accepting:
            return None
        fewest = min(channel.in_progress for channel in accepting)
        return random.choice([channel for channel in accepting if channel.in_progress == fewest])

    async def choose_or_connect(self) -> Channel | None:
        """As `choose`, but waits while the connections are being made, which has a deadline."""
        channel = self.choose()
        if channel is None and self._refreshing is not None:
            await asyncio.wait([self._refreshing])
            channel = self.choose()
        return channel

    async def call_all(
        self, method: ReplicaMethod[_Result], *arguments: object, timeout: float
    ) -> list[_Result]:
        """Calls a method of all replicas.

        Returns the results of those that live; an empty list while Ray knows of none. Raises
        TimeoutError after `timeout` seconds, or if a replica has no free slot to say its address,
        and no call has told it before. Raises the HostError of a method, HostError UNAVAILABLE for
        a replica that cannot be reached or whose method fails, and what Ray raises.
        """
        expected = 0
        try:
            found = await self._ask_addresses(min(timeout, _SLOT_SECONDS))
        except TimeoutError:
            if not self._known:
                raise
            found = self._known  # some replica has no free slot to say its address
            expected = await count_replicas(self._get_handle()) + (not self.counted)
        if None in found:
            call = ("call_method", method.name, arguments)
            answers = await broadcast(self._get_handle(), *call, timeout=timeout)
            return list(map(checked, answers))
        calls = [self._call(address, method, arguments) for address in found if address]
        try:
            parts = await asyncio.wait_for(asyncio.gather(*calls), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"'{method.name}' was not answered within {timeout:g} s") from None
        results = [result for part in parts for result in part]
        if len(results) < expected:
            raise TimeoutError(f"'{method.name}' has reached {len(results)} of {expected} replicas")
        return results

    async def call_one(
        self, method: ReplicaMethod[_Result], *arguments: object, timeout: float
    ) -> _Result:
        """Calls a method of one replica. Raises as `call_all`."""
        while (channel := self.choose()) is not None:
            try:
                return await asyncio.wait_for(channel.call(method, *arguments), timeout)
            except NotTakenError:
                continue  # it has gone, and accepts no more
            except ChannelLostError:
                raise unavailable("the replica that answered has died") from None
            except asyncio.TimeoutError:
                raise TimeoutError(f"'{method.name}' was not answered in {timeout:g} s") from None
        response = self._get_handle().call_method.remote(method.name, arguments)
        result: _Result = checked(await asyncio.wait_for(response, timeout))
        return result

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
        self,
        address: ChannelAddress,
        method: ReplicaMethod[_Result],
        arguments: tuple[object, ...],
    ) -> list[_Result]:
        """A list of the result; an empty one if the replica has died. Raises HostError."""
        if self._own is not None and address == self._own_address:
            return [await self._own.call_own(method.name, arguments)]
        place = f"the replica at {address}"
        for _ in range(_ATTEMPTS):
            try:
                channel = await self._connect(address)
                return [await channel.call(method, *arguments)]
            except ConnectionRefusedError:
                self._known.discard(address)
                return []
            except NotTakenError:
                continue  # the connection has ended before
            except ChannelLostError:
                text = f"the connection to {place} has ended in '{method.name}'"
                raise unavailable(text) from None
            except OSError as error:
                raise unavailable(f"{place} cannot be reached: {error}") from error
        raise unavailable(f"{place} has not taken '{method.name}'")

    async def _connect(self, address: ChannelAddress) -> Channel:
        """The connection, also for others that ask at the same time. Raises OSError."""
        if self._closed:
            raise _closed_error()
        channel = self._channels.get(address)
        if channel is not None and channel.accepts:
            return channel
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open(address))
            self._connecting[address] = task
            task.add_done_callback(lambda _: self._connecting.pop(address))
        await asyncio.wait([task])
        if task.cancelled():
            raise _closed_error()
        return task.result()

    async def _open(self, address: ChannelAddress) -> Channel:
        channel = await Channel.connect(address)
        if self._closed:  # a cancellation may arrive too late
            channel.close()
            raise _closed_error()
        self._channels[address] = channel  # here, as those that wait may be cancelled
        name = self._get_handle().deployment_name
        _log.info("connected to a replica of deployment '%s' at %s", name, address)
        return channel

    async def _refresh(self) -> None:
        try:
            found = await self._ask_addresses(_SLOT_SECONDS)
            self._pause = _REFRESH_SECONDS
        except (RayError, RayServeException, TimeoutError) as error:
            _log.debug("did not receive the addresses of replicas: %s", error)  # handles say why
            found = self._known
            self._pause = min(2 * self._pause, _MAX_REFRESH_SECONDS)
        connections = await asyncio.gather(
            *(self._connect(one) for one in found if one is not None), return_exceptions=True
        )
        _log_failures(connections)

    def _refresh_ended(self, task: asyncio.Future[None]) -> None:
        self._refreshing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("cannot find out the addresses of replicas", exc_info=error)

    def close(self) -> None:
        """Closes all connections; no others are made."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        for task in self._connecting.values():
            task.cancel()
        for channel in self._channels.values():
            channel.close()


def _closed_error() -> OSError:
    return ConnectionAbortedError("the connections to replicas are closed")


def _log_failures(connections: Iterable[Channel | BaseException]) -> None:
    for one in connections:
        if isinstance(one, OSError):
            _log.warning("no connection to a replica, requests go through Ray: %s", one)
        elif isinstance(one, BaseException):
            raise one

"""Calls of all replicas of a deployment, with real connections and without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from host.errors import ErrorCode, HostError
from host.ray.channel_messages import ReplicaMethod
from host.ray.channel_server import (
    SECRET_BYTES,
    ChannelAddress,
    ChannelServer,
    accept_client,
)
from tests.conftest import DEADLINE

ray = pytest.importorskip("ray", reason="ray is not installed: make test-ray")

from host.ray import replica_channels  # noqa: E402
from host.ray.replica_channels import ReplicaChannels  # noqa: E402

SECRET = bytes(SECRET_BYTES)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE))


class Handle:
    """Ray's handle. `addresses`: what a broadcast finds; None if a replica has no free slot."""

    app_name, deployment_name = "app", "deployment"

    def __init__(self, addresses: list[ChannelAddress | None] | None = None) -> None:
        self.addresses = addresses
        self.asked = 0

    def broadcast(self, *_: Any) -> Handle:
        self.asked += 1
        return self

    async def results_async(self, **_: Any) -> list[ChannelAddress | None]:
        if self.addresses is None:
            raise TimeoutError
        return self.addresses


class PortlessHandle(Handle):
    """Ray's handle of a deployment whose only replica has no port."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__([None])
        self._server = server
        self.call_method = self

    def broadcast(self, method: str, *arguments: Any) -> Handle:
        self.asked += 1
        if method == "exchange_address":
            return self
        assert method == "call_method"
        return RayAnswer(self.remote(*arguments))

    async def remote(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return await self._server.answer_ray(name, arguments)


class RayAnswer(Handle):
    """What a broadcast of Ray returns."""

    def __init__(self, answer: Coroutine[Any, Any, Any]) -> None:
        super().__init__()
        self._answer = answer

    async def results_async(self, **_: Any) -> list[Any]:
        return [await self._answer]


@pytest.fixture
def set_running(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many replicas Ray says that there are."""

    def set_count(count: int) -> None:
        deployment = SimpleNamespace(replica_states={"RUNNING": count, "STARTING": 1})
        application = SimpleNamespace(deployments={"deployment": deployment})
        status = SimpleNamespace(applications={"app": application})
        monkeypatch.setattr(ray.serve, "status", lambda: status)

    return set_count


SAY = ReplicaMethod[str]("say", tuple[str], str)
FAIL = ReplicaMethod[None]("fail", tuple[()], None)


async def say(word: str) -> str:
    return word


async def fail() -> None:
    raise ValueError("it has failed")


async def start() -> tuple[ChannelServer, ChannelAddress]:
    def infer(*_: Any) -> Any:
        raise AssertionError

    server = ChannelServer(infer, infer, {SAY: say, FAIL: fail})
    return server, await server.start("127.0.0.1")


def test_a_call_that_cannot_reach_all_replicas_fails(set_running: Callable[[int], None]) -> None:
    async def case() -> None:
        own, other, handle = await start(), await start(), Handle()
        channels = ReplicaChannels(lambda: handle, own)
        set_running(1)  # another one, which has no free slot; this one starts
        with pytest.raises(TimeoutError):
            await channels.call_all(SAY, "a", timeout=DEADLINE)
        channels.counted = True
        assert await channels.call_all(SAY, "a", timeout=DEADLINE) == ["a"]
        set_running(2)
        with pytest.raises(TimeoutError, match="1 of 2"):
            await channels.call_all(SAY, "a", timeout=DEADLINE)
        channels.learn(other[1])
        assert await channels.call_all(SAY, "a", timeout=DEADLINE) == ["a", "a"]
        handle.addresses = [own[1], other[1]]
        assert await channels.call_all(SAY, "a", timeout=DEADLINE) == ["a", "a"]
        channels.close()
        await own[0].close()
        await other[0].close()

    run(case())


def test_a_replica_without_a_port_is_called_through_ray_with_the_same_errors() -> None:
    async def case() -> None:
        server, _ = await start()
        handle = PortlessHandle(server)
        channels = ReplicaChannels(lambda: handle)
        assert await channels.call_all(SAY, "a", timeout=DEADLINE) == ["a"]
        assert await channels.call_one(SAY, "a", timeout=DEADLINE) == "a"
        for call in (channels.call_all, channels.call_one):
            with pytest.raises(HostError, match="failed to answer 'fail'") as caught:
                await call(FAIL, timeout=DEADLINE)
            assert caught.value.code is ErrorCode.UNAVAILABLE
        channels.close()
        await server.close()

    run(case())


def test_only_a_replica_that_refuses_connections_has_died() -> None:
    async def case() -> None:
        ended = 0

        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal ended
            ended += 1
            assert await accept_client(reader, writer, SECRET)
            await reader.readexactly(1)  # the beginning of the call
            writer.close()

        server = await asyncio.start_server(end, "127.0.0.1", 0)
        address = ChannelAddress("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
        handle = Handle([address])
        channels = ReplicaChannels(lambda: handle)
        with pytest.raises(HostError, match="not taken") as caught:
            await channels.call_all(SAY, "a", timeout=DEADLINE)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert ended == 2
        server.close()
        assert await channels.call_all(SAY, "a", timeout=DEADLINE) == []
        channels.close()

    run(case())


def test_errors_of_methods_are_alike_for_all_replicas() -> None:
    async def case() -> None:
        own, other = await start(), await start()
        for address in (own[1], other[1]):
            handle = Handle([address])
            channels = ReplicaChannels(lambda: handle, own)  # noqa: B023
            with pytest.raises(HostError, match="'fail': ValueError: it has failed") as caught:
                await channels.call_all(FAIL, timeout=DEADLINE)
            assert caught.value.code is ErrorCode.UNAVAILABLE
            channels.close()
        await own[0].close()
        await other[0].close()

    run(case())


def test_callers_with_one_request_at_a_time_use_all_replicas() -> None:
    async def case() -> None:
        servers = [await start() for _ in range(2)]
        handle = Handle([address for _, address in servers])
        channels = ReplicaChannels(lambda: handle)
        assert await channels.call_all(SAY, "a", timeout=DEADLINE) == ["a", "a"]
        assert len({id(channels.choose()) for _ in range(100)}) == 2
        channels.close()
        for server, _ in servers:
            await server.close()

    run(case())


def test_a_first_request_may_wait_for_the_connections() -> None:
    async def case() -> None:
        server, address = await start()
        handle = Handle([address])
        channels = ReplicaChannels(lambda: handle)
        channel = await channels.choose_or_connect()
        assert channel is not None and channel.address == address
        channels.close()
        await server.close()
        handle.addresses = None  # it has no free slot
        channels = ReplicaChannels(lambda: handle)
        assert await channels.choose_or_connect() is None
        channels.close()

    run(case())


def test_a_deployment_without_a_free_slot_is_asked_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case() -> None:
        now, handle = 0.0, Handle()
        monkeypatch.setattr(replica_channels, "time", SimpleNamespace(monotonic=lambda: now))
        channels = ReplicaChannels(lambda: handle)
        for second in range(300):
            now = float(second)
            channels.choose()
            for _ in range(10):
                await asyncio.sleep(0)
        assert 6 <= handle.asked <= 12
        channels.close()

    run(case())


def test_connections_that_are_being_made_are_closed() -> None:
    async def case() -> None:
        other, handle = await start(), Handle()
        handle.addresses = [other[1]]
        channels = ReplicaChannels(lambda: handle)
        call = asyncio.ensure_future(channels.call_all(SAY, "a", timeout=DEADLINE))
        for _ in range(100):
            await asyncio.sleep(0)
            if channels._connecting:
                break
        channels.close()
        with pytest.raises(HostError, match="closed"):
            await call
        await other[0].close()

    run(case())


def test_nothing_connects_to_replicas_after_the_end() -> None:
    async def case() -> None:
        other, handle = await start(), Handle()
        handle.addresses = [other[1]]
        channels = ReplicaChannels(lambda: handle)
        channels.close()
        with pytest.raises(HostError, match="closed"):
            await channels.call_all(SAY, "a", timeout=DEADLINE)
        assert channels.choose() is None
        assert not channels._refreshing and not channels._channels
        await other[0].close()

    run(case())

"""RPCs that HAProxy sends to a replica, answered without Ray Serve's handling of requests.

Ray Serve has a gRPC server of grpcio in such a replica, and spends more CPU on each request than
that server and pbhost together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from host.errors import HostError
from host.ray.response_batches import ResponseBatches
from host.ray.rpc_methods import RpcMethods
from host.ray.servicer import Rpc

_Result = TypeVar("_Result")


class DirectRpcs:
    """Passes RPCs of the gRPC server to a replica, whose event loop may be another thread's.

    Methods run on the loop of the server.
    """

    def __init__(self, methods: RpcMethods) -> None:
        self._methods = methods
        self._loop = asyncio.get_running_loop()
        self.ongoing = 0
        """RPCs in progress. Ray Serve does not count them."""

    async def call(self, rpc: Rpc, request: bytes, context: Any) -> bytes:
        """Answers a unary RPC; an error is in the status of the context."""
        self.ongoing += 1
        try:
            return await self._run(self._methods.answer_rpc(rpc, request, context))
        finally:
            self.ongoing -= 1

    async def stream(
        self, rpc: Rpc, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Yields the responses of a stream; an error is in the status of the context."""
        self.ongoing += 1
        messages = _messages_of(requests, asyncio.get_running_loop())
        opened: list[ResponseBatches] = []  # not a result, which a cancellation would lose

        async def open_stream() -> None:
            opened.append(self._methods.open_stream(rpc, messages, context))

        async def close_stream() -> None:
            for one in opened:
                await one.aclose()

        try:
            await self._run(open_stream())
            while batch := await self._run(anext(opened[0], None)):
                for response in batch:
                    yield response
        except HostError as error:
            self._methods.set_error(context, error)
        finally:
            self.ongoing -= 1
            await self._run(close_stream())

    async def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return await run_on(self._loop, coroutine)


async def run_on(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _Result]
) -> _Result:
    """The result of a coroutine that runs on an event loop, of this thread or another one."""
    if loop is asyncio.get_running_loop():
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


async def _messages_of(
    requests: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop
) -> AsyncIterator[bytes]:
    """Yields the messages of a client on another loop, each when the one before it is taken."""

    async def take() -> bytes | None:
        # To cancel a read would free memory that grpcio still writes to. It ends with the RPC.
        read = asyncio.ensure_future(anext(requests, None))
        read.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.wait([read])
        return read.result()

    while (message := await run_on(loop, take())) is not None:
        yield message

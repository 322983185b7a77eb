"""The methods that Ray Serve's gRPC servers carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from host.ray.servicer import _read_ahead, add_servicer, list_rpcs
from tests.conftest import DEADLINE


class Proxy:
    """A gRPC server of Ray Serve: it puts functions of its own into each handler."""

    def __init__(self, server: Any, unary: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._server = server
        self.handlers: dict[str, Any] = {}
        self._functions = {"unary_unary": unary, "stream_stream": stream}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for path, handler in handlers[0]._method_handlers.items():
            self.handlers[path] = handler._replace(
                response_serializer=None, unary_stream=None, stream_unary=None, **self._functions
            )
        handlers[0]._method_handlers = self.handlers
        if self._server is not None:
            self._server.add_generic_rpc_handlers(handlers)


def test_every_method_of_the_protocol_is_carried_as_bytes() -> None:
    proxy = Proxy(None, lambda *_: None, lambda *_: None)
    add_servicer(object(), proxy)
    assert set(proxy.handlers) == {rpc.path for rpc in list_rpcs()}
    assert proxy.handlers["/inference.GRPCInferenceService/ModelStreamInfer"].request_streaming
    assert not proxy.handlers["/inference.GRPCInferenceService/ModelInfer"].request_streaming
    assert all(handler.request_deserializer is None for handler in proxy.handlers.values())


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (
            grpc.StatusCode.INTERNAL,
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Replica",
            grpc.StatusCode.UNAVAILABLE,
        ),
        (
            grpc.StatusCode.INTERNAL,
            "The actor 5f1b2c3d4e is unavailable: the connection broke. The task may or may not",
            grpc.StatusCode.UNAVAILABLE,
        ),
        (grpc.StatusCode.INTERNAL, "The actor is not in the film", grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.INTERNAL, "The actor died in 1980", grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.INTERNAL, "execute raised ValueError", grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.NOT_FOUND, "The actor died", grpc.StatusCode.NOT_FOUND),
    ],
)
def test_a_request_that_died_with_its_replica_is_unavailable(
    code: grpc.StatusCode, text: str, expected: grpc.StatusCode
) -> None:
    async def unary(request: bytes, context: Any) -> bytes:
        context.set_code(code)
        context.set_details(text)
        return request

    async def stream(requests: Any, context: Any) -> AsyncIterator[list[bytes]]:
        yield [await unary(b"one", context)]

    async def call() -> None:
        server = grpc.aio.server()
        proxy = Proxy(server, unary, stream)
        add_servicer(object(), proxy)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as typed:
            channel: Any = typed  # messages are bytes, without serializers
            service = "/inference.GRPCInferenceService"
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary(f"{service}/ModelInfer")(b"request")
            assert failed.value.code() is expected
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for response in channel.stream_stream(f"{service}/ModelStreamInfer")(
                    iter([])
                ):
                    assert response == b"one"
            assert failed.value.code() is expected
        await server.stop(None)

    asyncio.run(call())


@pytest.mark.parametrize("ready", [1, 3])
def test_a_stream_that_ends_while_a_response_is_written_is_cancelled(ready: int) -> None:
    async def call() -> None:
        cancelled = asyncio.Event()

        async def responses() -> AsyncGenerator[list[bytes], None]:
            for _ in range(ready):
                yield [b"response"]
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        stream = _read_ahead(responses())
        assert await anext(stream) == [b"response"]
        for _ in range(ready - 2):
            assert await anext(stream) == [b"response"]
        await asyncio.sleep(0)  # the next response is there, if there is one
        await stream.aclose()
        await asyncio.wait_for(cancelled.wait(), DEADLINE)

    asyncio.run(call())

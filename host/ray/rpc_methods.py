"""The methods of the inference protocol, as methods of a class that Ray Serve calls by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from host.errors import ErrorCode, HostError
from host.frontends.grpc.application import GrpcApplication
from host.frontends.grpc.methods import RETRY_METADATA
from host.ray.servicer import Rpc, list_rpcs, set_status


class EncodedMessage:
    """A message that is encoded already, in the shape that Ray Serve asks of messages."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        """Returns the message."""
        return self._data


class StreamError(Exception):
    """Ends a stream with the status that its context has."""


class RpcMethods:
    """A base class of deployments: each RPC is a method of its name.

    A subclass sets `rpcs`, which answers them, before the first request.
    """

    rpcs: GrpcApplication

    async def answer_rpc(self, rpc: Rpc, message: bytes, context: Any) -> EncodedMessage:
        """Answer a unary RPC; an error is in the status of the context."""
        try:
            metadata = context.invocation_metadata()
            return EncodedMessage(await self.rpcs.call(rpc.path, message, metadata))
        except HostError as error:
            return self.refuse(context, error)

    def refuse(self, context: Any, error: HostError) -> EncodedMessage:
        """The answer to a unary RPC that ends with an error."""
        self._set_error(context, error)
        return EncodedMessage(b"")

    async def answer_stream(
        self, rpc: Rpc, messages: Any, context: Any
    ) -> AsyncIterator[EncodedMessage]:
        """Yield the responses of a stream. Raises StreamError once its context has the status."""
        requests = _until_cancelled(messages)
        metadata = context.invocation_metadata()
        try:
            async with aclosing(self.rpcs.stream(rpc.path, requests, metadata)) as responses:
                async for response in responses:
                    yield EncodedMessage(response)
        except HostError as error:
            self._set_error(context, error)
            # Ray Serve takes the status of a stream from an exception only.
            raise StreamError(error.message) from None

    def _set_error(self, context: Any, error: HostError) -> None:
        status = self.rpcs.status(error)
        set_status(context, status.code, status.message)
        if status.retry_ms is not None:
            context.set_trailing_metadata(((RETRY_METADATA, str(status.retry_ms)),))


async def _until_cancelled(messages: Any) -> AsyncIterator[bytes]:
    """Yields the messages of a client. Raises HostError CANCELLED if it has gone."""
    async for message in messages:
        yield message
    if messages.is_cancelled():
        raise HostError(ErrorCode.CANCELLED, "the client has cancelled the stream")


def _unary_method(rpc: Rpc) -> Callable[..., Awaitable[EncodedMessage]]:
    # Ray Serve passes the context because of the name of the argument.
    async def method(self: RpcMethods, request: bytes, grpc_context: Any) -> EncodedMessage:
        return await self.answer_rpc(rpc, request, grpc_context)

    return method


def _stream_method(rpc: Rpc) -> Callable[..., AsyncIterator[EncodedMessage]]:
    async def method(
        self: RpcMethods, requests: Any, grpc_context: Any
    ) -> AsyncIterator[EncodedMessage]:
        async for response in self.answer_stream(rpc, requests, grpc_context):
            yield response

    return method


for _rpc in list_rpcs():
    _method = _stream_method(_rpc) if _rpc.streams else _unary_method(_rpc)
    _method.__name__ = _method.__qualname__ = _rpc.name
    setattr(RpcMethods, _rpc.name, _method)

"""The methods of the inference protocol, as methods of a class that Ray Serve calls by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from host.errors import HostError
from host.frontends.grpc.grpc_application import GrpcApplication
from host.frontends.grpc.methods import RETRY_METADATA
from host.frontends.request_headers import Header
from host.ray.servicer import Rpc, list_rpcs, set_status
from host.ray.streams import ResponseBatches, StreamWindow

_Encoded = TypeVar("_Encoded", bytes, list[bytes])


class EncodedMessage(Generic[_Encoded]):
    """A message that is encoded already, in the shape that Ray Serve asks of messages.

    Of a stream, it is a batch of messages, which `host.ray.servicer` takes apart.
    """

    __slots__ = ("_data",)

    def __init__(self, data: _Encoded) -> None:
        self._data: _Encoded = data

    def SerializeToString(self) -> _Encoded:
        """Returns the message."""
        return self._data


class StreamError(Exception):
    """Ends a stream with the status that its context has."""


class RpcMethods:
    """A base class of deployments: each RPC is a method of its name.

    A subclass sets `rpcs`, which answers them, before the first request.
    """

    rpcs: GrpcApplication

    async def answer_rpc(self, rpc: Rpc, message: bytes, context: Any) -> bytes:
        """Answers a unary RPC; an error is in the status of the context."""
        try:
            return await self.call_rpc(rpc.path, message, context.invocation_metadata())
        except HostError as error:
            self.set_error(context, error)
            return b""

    async def call_rpc(self, path: str, message: bytes, metadata: Sequence[Header]) -> bytes:
        """The response to a unary RPC. Raises HostError."""
        return await self.rpcs.call(path, message, metadata)

    def open_stream(
        self, rpc: Rpc, messages: AsyncIterator[bytes], context: Any
    ) -> ResponseBatches:
        """The responses of a stream; they end with HostError."""
        metadata = context.invocation_metadata()
        return ResponseBatches(self.rpcs.stream(rpc.path, messages, metadata))

    async def answer_stream(
        self, rpc: Rpc, received: Any, context: Any
    ) -> AsyncIterator[EncodedMessage[list[bytes]]]:
        """Yields the responses of a stream to a proxy of Ray Serve.

        Raises StreamError once its context has the status.
        """
        window = StreamWindow(received)
        try:
            async with aclosing(self.open_stream(rpc, window.messages(), context)) as batches:
                await window.wait_for_room()
                async for batch in batches:
                    yield EncodedMessage(batch)
                    await window.wait_for_room()
        except HostError as error:
            self.set_error(context, error)
            # Ray Serve takes the status of a stream from an exception only.
            raise StreamError(error.message) from None
        finally:
            window.close()

    def set_error(self, context: Any, error: HostError) -> None:
        """Sets the status of an RPC that ends with an error."""
        status = self.rpcs.status(error)
        set_status(context, status.code, status.message)
        if status.retry_ms is not None:
            # Ray Serve adds this to a list of its own.
            context.set_trailing_metadata([(RETRY_METADATA, str(status.retry_ms))])


def _unary_method(rpc: Rpc) -> Callable[..., Awaitable[EncodedMessage[bytes]]]:
    # Ray Serve passes the context because of the name of the argument.
    async def method(self: RpcMethods, request: bytes, grpc_context: Any) -> EncodedMessage[bytes]:
        return EncodedMessage(await self.answer_rpc(rpc, request, grpc_context))

    return method


def _stream_method(rpc: Rpc) -> Callable[..., AsyncIterator[EncodedMessage[list[bytes]]]]:
    async def method(
        self: RpcMethods, requests: Any, grpc_context: Any
    ) -> AsyncIterator[EncodedMessage[list[bytes]]]:
        async for response in self.answer_stream(rpc, requests, grpc_context):
            yield response

    return method


for _rpc in list_rpcs():
    _method = _stream_method(_rpc) if _rpc.streams else _unary_method(_rpc)
    _method.__name__ = _method.__qualname__ = _rpc.name
    setattr(RpcMethods, _rpc.name, _method)

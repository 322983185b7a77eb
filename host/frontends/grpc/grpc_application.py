"""The gRPC methods as an application for other gRPC servers: grpcio's, or a proxy's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from host.errors import HostError, unavailable
from host.frontends.error_status import GRPC_STATUS, retry_milliseconds
from host.frontends.grpc.methods import (
    Metadata,
    Method,
    ResponseCallback,
    RpcContext,
    Services,
    StreamHandler,
    StreamHandlerFactory,
    StreamMethod,
    UnaryMethod,
    to_host_error,
)
from host.frontends.grpc.service import GrpcService
from host.frontends.inference_core import Cancellable
from host.frontends.receive_memory import ReservedBytes
from host.frontends.request_headers import Header


async def serve_stream(
    open_stream: StreamHandlerFactory,
    requests: AsyncIterator[bytes],
    context: RpcContext,
    reserve: Callable[[bytes], ReservedBytes | None],
    set_retry: Callable[[int], None],
) -> AsyncGenerator[bytes, None]:
    """Yields the messages for the client; raises the error that ends the stream.

    `set_retry` gets milliseconds before the end if the last request was above a limit. The next
    message is taken once the one before it is written. A generator that is closed early cancels the
    requests of the stream.
    """
    writer = _QueueWriter()
    handler = open_stream(writer, context)
    reader = asyncio.ensure_future(writer.read_messages(handler, requests, reserve))
    reader.add_done_callback(writer.reading_finished)
    try:
        while (message := await writer.outgoing.get()) is not None:
            yield message
            handler.resume_writing()
    finally:
        writer.finished = True
        reader.cancel()
        handler.cancel()
    if writer.retry is not None:
        set_retry(writer.retry)
    if writer.error is not None:
        raise writer.error


class _QueueWriter:
    """Holds at most one message and the end."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.error: BaseException | None = None
        self.retry: int | None = None
        self.finished = False
        self._may_read = asyncio.Event()

    def write_message(self, message: bytes, more: bool) -> bool:
        self.outgoing.put_nowait(message)
        return False

    def resume_reading(self) -> None:
        self._may_read.set()

    def finish_stream(self, error: BaseException | None = None, retry: int | None = None) -> None:
        self.error, self.retry, self.finished = error, retry, True
        self.outgoing.put_nowait(None)

    async def read_messages(
        self,
        handler: StreamHandler,
        requests: AsyncIterator[bytes],
        reserve: Callable[[bytes], ReservedBytes | None],
    ) -> None:
        async for data in requests:
            if self.finished:
                return
            self._may_read.clear()
            if not handler.message_received(data, reserve(data)):
                await self._may_read.wait()
        if not self.finished:
            handler.half_closed()

    def reading_finished(self, reader: asyncio.Future[None]) -> None:
        if reader.cancelled():
            if not self.finished:  # by the iterator of the messages, not by `serve_stream`
                self.finish_stream(unavailable("the messages of the stream were cancelled"))
        elif (error := reader.exception()) is not None:
            self.finish_stream(error)


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """One RPC: its path is `/{service}/{name}`. `streams`: messages in both directions."""

    service: str
    name: str
    streams: bool


@dataclass(frozen=True, slots=True)
class GrpcStatus:
    """The status that ends an RPC with an error.

    Attributes:
        code: The number of the status, as `grpc.StatusCode` has it in its values.
        message: The text for the client.
        retry_ms: Milliseconds after which the client may try again, for the trailing metadata
            `grpc-retry-pushback-ms`; None if there is no such time.
    """

    code: int
    message: str
    retry_ms: int | None = None


class GrpcApplication:
    """The methods of `GRPCInferenceService` and `grpc.health.v1.Health` of a server.

    Another gRPC server on the same event loop passes it the bytes of messages. `call` and `stream`
    do not count messages in `--receive-buffer-byte-size`: that server has received them. Methods
    raise HostError; `status` says what the client gets for it.
    """

    def __init__(self, service: GrpcService) -> None:
        self._methods: dict[str, Method] = {
            f"/{name}/{method.name}": method
            for name, methods in service.services().items()
            for method in methods
        }
        self._service = service

    @property
    def methods(self) -> list[GrpcMethod]:
        """Every method."""
        return [
            GrpcMethod(path.split("/")[1], method.name, isinstance(method, StreamMethod))
            for path, method in self._methods.items()
        ]

    def services(self) -> Services:
        """The methods of each service, for an `H2Frontend`."""
        return self._service.services()

    @property
    def open_requests(self) -> int:
        """Number of open inference RPCs."""
        return self._service.open_requests

    async def call(self, path: str, message: bytes, metadata: Sequence[Header] = ()) -> bytes:
        """Answers a call of a method without streams. Cancelling it cancels the request.

        `metadata`: of the client, with lowercase keys. Raises HostError, and KeyError if there is
        no such method.
        """
        method = self._methods[path]
        if not isinstance(method, UnaryMethod):
            raise KeyError(path)
        try:
            return await method.handler(message, Metadata(metadata))
        except HostError:
            raise
        except Exception as error:  # the top of a call: a defect is logged and answered
            raise to_host_error(error) from error

    def start_infer(
        self,
        message: bytes,
        metadata: Sequence[Header],
        done: ResponseCallback,
        reserved: ReservedBytes | None = None,
    ) -> Cancellable:
        """ModelInfer without a coroutine: calls `done` once, maybe before it returns.

        `reserved`: the memory of the message, if it is counted. Cancelling what is returned cancels
        the request. Raises HostError.
        """
        try:
            return self._service.start_infer(message, done, Metadata(metadata), reserved)
        except HostError:
            raise
        except Exception as error:  # the top of a call, as above
            raise to_host_error(error) from error

    async def stream(
        self, path: str, messages: AsyncIterator[bytes], metadata: Sequence[Header] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yields the responses to the messages of a stream. Closing it cancels the requests.

        Raises as `call`.
        """
        method = self._methods[path]
        if not isinstance(method, StreamMethod):
            raise KeyError(path)
        responses = serve_stream(
            method.open_stream,
            messages,
            Metadata(metadata),
            lambda message: None,
            lambda retry: None,  # only the status of an error has a place for it
        )
        try:
            async for response in responses:
                yield response
        except HostError:
            raise
        except Exception as error:  # the top of a call, as above
            raise to_host_error(error) from error
        finally:
            await responses.aclose()

    @staticmethod
    def status(error: HostError) -> GrpcStatus:
        """The status of an RPC that this error ends."""
        return GrpcStatus(GRPC_STATUS[error.code], error.message, retry_milliseconds(error))

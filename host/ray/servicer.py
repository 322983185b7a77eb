"""Tells the gRPC servers of Ray Serve's proxies about the methods of the inference protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from host.frontends.grpc.methods import HEALTH_SERVICE, INFERENCE_SERVICE
from host.ray.streams import AcknowledgedMessages

GRPC_FUNCTION = "pbhost.ray.add_servicer"
"""What `grpc_servicer_functions` of Ray Serve must name."""

_LOST_REPLICA = re.compile(
    r"The actor (?:died unexpectedly before finishing this task\."
    r"|died because of an error raised in its creation task, "
    r"|experienced an error before finishing this task\."
    r"|(?:[0-9a-f]{8,}|None) is unavailable: )"
)
"""The beginnings of Ray's texts for a request whose replica has died (`ray.exceptions`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rpc:
    """One method of a service. `streams`: messages in both directions."""

    service: str
    name: str
    streams: bool

    @property
    def path(self) -> str:
        """The path in requests."""
        return f"/{self.service}/{self.name}"


def list_rpcs() -> Iterator[Rpc]:
    """Every method that is served."""
    from tritonclient.grpc import service_pb2

    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        yield Rpc(INFERENCE_SERVICE, method.name, method.client_streaming)
    yield Rpc(HEALTH_SERVICE, "Check", False)


def add_servicer(servicer: object, server: Any) -> None:
    """Adds the methods to a gRPC server of Ray Serve, which sends each to the replica's method of
    the same name.

    Messages stay bytes: nothing is parsed before the replica.
    """
    services: dict[str, dict[str, Any]] = {}
    for rpc in list_rpcs():
        handler = _MethodHandler(rpc, rpc.streams, rpc.streams)
        services.setdefault(rpc.service, {})[rpc.name] = handler
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


@dataclasses.dataclass(frozen=True)
class _MethodHandler:
    """A method's handler (`grpc.RpcMethodHandler`), which Ray Serve fills in by `_replace`.

    Ray answers a request whose replica has died with INTERNAL. Clients retry UNAVAILABLE.
    """

    rpc: Rpc
    request_streaming: bool
    response_streaming: bool
    request_deserializer: None = None
    response_serializer: None = None
    unary_unary: Callable[[bytes, Any], Awaitable[bytes]] | None = None
    unary_stream: Callable[[bytes, Any], AsyncIterator[bytes]] | None = None
    stream_unary: Callable[[Any, Any], Awaitable[bytes]] | None = None
    stream_stream: Callable[[Any, Any], AsyncIterator[bytes]] | None = None

    def _replace(self, **changes: Any) -> _MethodHandler:
        unary, stream = changes["unary_unary"], changes["stream_stream"]

        async def answer(request: bytes, context: Any) -> bytes:
            response: bytes = await unary(request, context)
            _report_lost_replica(context)
            return response

        async def answer_stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
            messages = AcknowledgedMessages(requests)
            try:
                async for batch in _read_ahead(stream(messages, _StreamContext(context))):
                    for response in batch:
                        yield response
                    messages.acknowledge()
            finally:
                messages.finish()
            _report_lost_replica(context)

        return dataclasses.replace(
            self, **{**changes, "unary_unary": answer, "stream_stream": answer_stream}
        )


class _StreamContext:
    """The context of a stream, for functions of Ray that may run after the end of the RPC.

    They log the address of the client then, and grpcio would read it from memory that is freed.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer: str = context.peer()

    def peer(self) -> str:
        """The address of the client."""
        return self._peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _read_ahead(
    responses: AsyncGenerator[list[bytes], None],
) -> AsyncGenerator[list[bytes], None]:
    """Yields batches of responses, and always waits for the next one meanwhile.

    Ray Serve passes a cancellation on to the replica only while it waits for a response. One that
    comes while a response is written would leave the request of the model running.
    """
    upcoming = asyncio.ensure_future(anext(responses))
    try:
        while True:
            try:
                response = await upcoming
            except StopAsyncIteration:
                return
            upcoming = asyncio.ensure_future(anext(responses))
            yield response
    finally:
        if upcoming.done() and not upcoming.cancelled() and upcoming.exception() is None:
            upcoming = asyncio.ensure_future(anext(responses))
        # Not at once: a task that has not begun would never enter the generator.
        asyncio.get_running_loop().call_soon(upcoming.cancel)


def _report_lost_replica(context: Any) -> None:
    if context.code() is not grpc.StatusCode.INTERNAL:
        return
    details = context.details()
    text = details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details)
    if _LOST_REPLICA.match(text):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details(
            "the replica that ran this request has died; another one answers, if the request may be"
            " sent again"
        )


def set_status(context: Any, code: int, message: str) -> None:
    """Sets the status of a call at its context in a replica. `code`: a number of gRPC."""
    context.set_code(next(status for status in grpc.StatusCode if status.value[0] == code))
    context.set_details(message)

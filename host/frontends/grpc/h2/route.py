"""From the header fields of a request to what serves it."""

from __future__ import annotations

from dataclasses import dataclass

from host.frontends.grpc.h2 import status
from host.frontends.grpc.h2.calls import Refusal, StreamCall, UnaryCall
from host.frontends.grpc.h2.connection import Connection
from host.frontends.grpc.h2.content_length import MeasuredStreamCall, MeasuredUnaryCall
from host.frontends.grpc.h2.headers import Fields
from host.frontends.grpc.h2.limits import Limits
from host.frontends.grpc.h2.rpc import Rpc, parse
from host.frontends.grpc.h2.status import Code, RpcFault
from host.frontends.grpc.h2.stream import Route, Stream
from host.frontends.grpc.methods import GrpcOptions, Method, Services, StreamMethod, UnaryMethod

_GRPC = b"application/grpc"


@dataclass(frozen=True, slots=True)
class _Unary:
    rpc: Rpc
    method: UnaryMethod

    def open(self, connection: Connection, stream_id: int) -> Stream:
        return UnaryCall(connection, stream_id, self.rpc, self.method)


@dataclass(frozen=True, slots=True)
class _Streaming:
    rpc: Rpc
    method: StreamMethod

    def open(self, connection: Connection, stream_id: int) -> Stream:
        return StreamCall(connection, stream_id, self.rpc, self.method)


@dataclass(frozen=True, slots=True)
class _Measured:
    rpc: Rpc
    length: int

    def open(self, connection: Connection, stream_id: int) -> Stream:
        call: MeasuredStreamCall | MeasuredUnaryCall
        if isinstance(self.rpc.method, StreamMethod):
            call = MeasuredStreamCall(connection, stream_id, self.rpc, self.rpc.method)
        else:
            call = MeasuredUnaryCall(connection, stream_id, self.rpc, self.rpc.method)
        call.missing = self.length
        return call


@dataclass(frozen=True, slots=True)
class _Refused:
    block: bytes

    def open(self, connection: Connection, stream_id: int) -> Stream:
        return Refusal(connection, stream_id, self.block)


class Router:
    """Knows the methods of all services. `route` never raises: a refusal is a route too."""

    def __init__(self, services: Services, options: GrpcOptions, limits: Limits) -> None:
        self._methods: dict[bytes, Method] = {
            f"/{service}/{method.name}".encode(): method
            for service, methods in services.items()
            for method in methods
        }
        self._level = options.compression_level
        self._most = limits.header_list

    def route(self, fields: Fields, size: int) -> Route:
        """What serves a request with these fields, which count as `size` bytes."""
        known = dict(fields)
        if known[b":method"] != b"POST":
            return _Refused(status.http_error(405))
        if not _is_grpc(known.get(b"content-type", b"")):
            return _Refused(status.http_error(415))
        try:
            if size > self._most:
                text = f"received metadata of {size} bytes, the limit is {self._most}"
                raise RpcFault(Code.RESOURCE_EXHAUSTED, text)
            rpc = parse(fields, self._methods, self._level)
        except RpcFault as fault:
            end = status.trailers(fault.code, fault.message)
            return _Refused(status.RESPONSE + status.ACCEPT_ENCODING + end)
        if length := known.get(b"content-length"):
            return _Measured(rpc, int(length))
        if isinstance(rpc.method, StreamMethod):
            return _Streaming(rpc, rpc.method)
        return _Unary(rpc, rpc.method)


def _is_grpc(content_type: bytes) -> bool:
    """`application/grpc`, maybe with a suffix or parameters."""
    return content_type == _GRPC or content_type.startswith((_GRPC + b"+", _GRPC + b";"))

"""Routes requests by their header fields to the stream classes that handle them."""

from __future__ import annotations

from functools import partial

from host.frontends.grpc.h2 import status
from host.frontends.grpc.h2.calls import RefusedCall
from host.frontends.grpc.h2.headers import Fields
from host.frontends.grpc.h2.limits import ConnectionLimits
from host.frontends.grpc.h2.rpc import parse_rpc
from host.frontends.grpc.h2.status import RpcError, StatusCode
from host.frontends.grpc.h2.stream import Route
from host.frontends.grpc.h2.stream_call import StreamCall
from host.frontends.grpc.h2.unary_call import UnaryCall
from host.frontends.grpc.methods import GrpcOptions, Method, Services, StreamMethod

_GRPC = b"application/grpc"


class Router:
    """Finds the route of a request among the methods of all services."""

    def __init__(self, services: Services, options: GrpcOptions, limits: ConnectionLimits) -> None:
        self._methods: dict[bytes, Method] = {
            f"/{service}/{method.name}".encode(): method
            for service, methods in services.items()
            for method in methods
        }
        self._compression_level = options.compression_level
        self._max_header_list = limits.max_header_list

    def route(self, fields: Fields, size: int) -> Route:
        """Returns the route of a request; one that is refused has a route that answers an error.

        `size` is the size of the header list in bytes (RFC 9113 section 6.5.2).
        """
        known = dict(fields)
        if known[b":method"] != b"POST":
            return _refused(status.http_error_headers(405))
        if not _is_grpc(known.get(b"content-type", b"")):
            return _refused(status.http_error_headers(415))
        try:
            if size > self._max_header_list:
                text = f"received metadata of {size} bytes, the limit is {self._max_header_list}"
                raise RpcError(StatusCode.RESOURCE_EXHAUSTED, text)
            rpc = parse_rpc(fields, self._methods, self._compression_level)
        except RpcError as fault:
            end = status.trailers(fault.code, fault.message)
            return _refused(status.RESPONSE_HEADERS + status.ACCEPT_ENCODING + end)
        length = known.get(b"content-length")
        call = StreamCall if isinstance(rpc.method, StreamMethod) else UnaryCall
        return Route(
            partial(call, rpc, int(length) if length else None),
            acts_at_once=call is StreamCall or rpc.timeout is not None,
        )


def _refused(block: bytes) -> Route:
    return Route(partial(RefusedCall, block), acts_at_once=True)


def _is_grpc(content_type: bytes) -> bool:
    """Whether a content type is `application/grpc`, with any suffix or parameters."""
    return content_type == _GRPC or content_type.startswith((_GRPC + b"+", _GRPC + b";"))

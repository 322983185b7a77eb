"""Access control of gRPC methods: the metadata that a restricted API category requires."""

from __future__ import annotations

import dataclasses

from host.errors import unavailable
from host.frontends.grpc.methods import (
    Method,
    RpcContext,
    StreamHandler,
    StreamMethod,
    StreamWriter,
)
from host.frontends.request_headers import Restrictions


def check_restriction(restrictions: Restrictions, category: str, context: RpcContext) -> None:
    """Raises HostError unless the client sent the metadata that the category requires."""
    lacking = restrictions.missing_header(category, context.metadata)
    if lacking is not None:
        raise unavailable(f"This protocol is restricted, expecting header '{lacking}'")


def restrict_method(method: Method, restrictions: Restrictions) -> Method:
    """The method with access control, before anything is read from a stream."""
    if method.category not in restrictions:
        return method
    if isinstance(method, StreamMethod):
        open_stream = method.open_stream

        def open_restricted(writer: StreamWriter, context: RpcContext) -> StreamHandler:
            check_restriction(restrictions, method.category, context)
            return open_stream(writer, context)

        return dataclasses.replace(method, open_stream=open_restricted)
    handler = method.handler

    async def handle_restricted(data: bytes, context: RpcContext) -> bytes:
        check_restriction(restrictions, method.category, context)
        return await handler(data, context)

    return dataclasses.replace(method, handler=handle_restricted)

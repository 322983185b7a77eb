"""The port that HAProxy sends gRPC requests of a replica to, served by pbhost's own HTTP/2.

Ray Serve has a server of grpcio there, which costs three times the CPU of all else in a replica.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import grpc

from host.errors import unavailable
from host.frontends.grpc.h2.frontend import H2Frontend
from host.frontends.grpc.h2.limits import ConnectionLimits
from host.frontends.grpc.methods import Method, RpcContext, Services, UnaryMethod
from host.frontends.sockets import BACKLOG

_Result = TypeVar("_Result")

RAY_SERVICE = "ray.serve.RayServeAPIService"
RAY_METHODS = "Healthz", "ListApplications"

_UNLIMITED = (1 << 30, 1 << 30)
_LIMITS = ConnectionLimits(reset_rate=_UNLIMITED, no_op_frame_rate=_UNLIMITED)
"""All clients share the connections of HAProxy."""

RayHandler = Callable[[bytes, Any], Awaitable[bytes]]
"""Takes a message and a context of grpcio, at which it sets the status."""


class ReplicaServices(Protocol):
    """A replica, as its port serves it."""

    def services(self) -> Services:
        """The methods of each service."""


class ReplicaPort:
    """Serves the methods of a replica and those of Ray Serve. Belongs to the event loop of Ray.

    It has the methods of the server that Ray Serve starts itself. `loop`: that of the replica.
    `ray_methods`: the handlers of Ray's own methods by name.
    """

    def __init__(
        self,
        replica: ReplicaServices,
        loop: asyncio.AbstractEventLoop,
        ray_methods: Mapping[str, RayHandler],
    ) -> None:
        self._replica = replica
        self._loop = loop
        self._ray_loop = asyncio.get_running_loop()
        self._ray_methods = ray_methods
        self._frontend = H2Frontend(self)
        self._stopped = asyncio.Event()

    def services(self) -> Services:
        """The methods of each service."""
        own: list[Method] = [self._ray_method(*one) for one in self._ray_methods.items()]
        return {**self._replica.services(), RAY_SERVICE: own}

    async def drain(self, timeout: float) -> bool:
        """Returns at once: requests are answered as long as the port is open."""
        return True

    def _ray_method(self, name: str, handler: RayHandler) -> UnaryMethod:
        async def answer(message: bytes, context: RpcContext) -> bytes:
            status = _Status()
            response = await run_on(self._ray_loop, _call(handler, message, status))
            if status.code is not grpc.StatusCode.OK:
                raise unavailable(status.details)
            return response

        return UnaryMethod(name, answer, "health")

    async def start(self, port: int) -> int:
        """Listens on a port of all addresses, and returns it; 0 selects a free one.

        Raises RuntimeError with an OSError as its cause if the port cannot be used.
        """
        try:
            listening = _listen(port)
        except OSError as error:
            raise RuntimeError(f"port {port} cannot be used: {error}") from error
        self._frontend = H2Frontend(self, limits=_LIMITS, listening=listening)
        return await run_on(self._loop, self._frontend.start())

    async def stop(self, grace: float | None) -> None:
        """Accepts no more connections, and waits at most `grace` seconds for open requests."""
        await run_on(self._loop, self._frontend.stop(grace or 0.0))
        self._stopped.set()

    async def wait_for_termination(self) -> None:
        """Returns once it is stopped."""
        await self._stopped.wait()


def serve_replica_port(replica: ReplicaServices) -> None:
    """Lets Ray Serve start a ReplicaPort when it opens the gRPC port of this process.

    Called on the event loop of the replica, which may be another thread's than Ray's.
    """
    from ray.serve._private import replica as ray_replica
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    loop = asyncio.get_running_loop()

    async def start_grpc_server(
        make_handler: Callable[..., RayHandler],
        grpc_options: Any,
        *,
        event_loop: asyncio.AbstractEventLoop,
        enable_so_reuseport: bool = False,
    ) -> tuple[asyncio.Task[None], ReplicaPort]:
        ray_methods = {
            name: make_handler(
                service_method=f"/{RAY_SERVICE}/{name}",
                streaming_type=gRPCStreamingType.UNARY_UNARY,
            )
            for name in RAY_METHODS
        }
        port = ReplicaPort(replica, loop, ray_methods)
        await port.start(grpc_options.port)
        return event_loop.create_task(port.wait_for_termination()), port

    ray_replica.start_grpc_server = start_grpc_server


class _Status:
    """The part of a grpcio context that Ray's own methods need."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


async def _call(handler: RayHandler, message: bytes, status: _Status) -> bytes:
    return await handler(message, status)


def _listen(port: int) -> socket.socket:
    """A socket that listens on all addresses. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=BACKLOG)


async def run_on(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _Result]
) -> _Result:
    """The result of a coroutine that runs on an event loop, of this thread or another one."""
    if loop is asyncio.get_running_loop():
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))

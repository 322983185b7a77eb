"""The port that HAProxy sends gRPC requests of a replica to, served by pbhost's own HTTP/2.

Ray Serve has a server of grpcio there, which costs three times the CPU of all else in a replica.
`serve_replica_port` replaces a private function of Ray, if it is the one that is known here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import grpc

from host.errors import unavailable
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import H2Frontend
from host.frontends.grpc.methods import Method, RpcContext, Services, UnaryMethod
from host.frontends.sockets import BACKLOG

_log = logging.getLogger("pbhost")

_Result = TypeVar("_Result")

RAY_SERVICE = "ray.serve.RayServeAPIService"
RAY_METHODS = "Healthz", "ListApplications"

_START_SECONDS = 10.0
_HEALTH_SECONDS = 10.0
_CLOSE_SECONDS = 5.0  # in addition to the grace

_FRAME_RATE = (1 << 16, 1 << 13)
_LIMITS = ConnectionLimits(reset_rate=_FRAME_RATE, no_op_frame_rate=_FRAME_RATE)
"""All clients share the connections of HAProxy; others reach the port, too."""

_REPLACED = "ray.serve._private.replica"
_SIGNATURE = "(service_handler_factory, grpc_options, *, event_loop, enable_so_reuseport=False)"
_FACTORY = "_direct_ingress_service_handler_factory"
_FACTORY_SIGNATURE = "(self, service_method, streaming_type)"
"""Of the method of Ray's class Replica that is the `service_handler_factory`."""
_UNARY_TYPE = "ray.serve._private.proxy_request_response.gRPCStreamingType.UNARY_UNARY"

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
            called = _call(handler, message, status)
            try:
                response = await run_on(self._ray_loop, called, _HEALTH_SECONDS)
            except TimeoutError as error:
                raise unavailable(f"{name} of Ray Serve: {error}") from None
            if status.code is not grpc.StatusCode.OK:
                raise unavailable(status.details)
            return response

        return UnaryMethod(name, answer, "health")

    async def start(self, port: int) -> int:
        """Listens on a port of all addresses, and returns it; 0 selects a free one.

        Raises RuntimeError with an OSError as its cause if the port cannot be used, and
        TimeoutError if the event loop of the replica does not answer.
        """
        try:
            listening = _listen(port)
        except OSError as error:
            raise RuntimeError(f"port {port} cannot be used: {error}") from error
        self._frontend = H2Frontend(self, limits=_LIMITS, listening=listening)
        try:
            return await run_on(self._loop, self._frontend.start(), _START_SECONDS)
        except BaseException:  # also a cancelled start leaves the port free
            listening.close()
            raise

    async def stop(self, grace: float | None) -> None:
        """Accepts no more connections, and waits at most `grace` seconds for open requests.

        Raises TimeoutError if the event loop of the replica does not answer.
        """
        seconds = grace or 0.0
        try:
            await run_on(self._loop, self._frontend.stop(seconds), seconds + _CLOSE_SECONDS)
        finally:
            self._stopped.set()

    async def wait_for_termination(self) -> None:
        """Returns once it is stopped."""
        await self._stopped.wait()


def serve_replica_port(replica: ReplicaServices) -> bool:
    """Lets Ray Serve start a ReplicaPort when it opens the gRPC port of this process.

    Called on the event loop of the replica, which may be another thread's than Ray's. Returns
    whether Ray will do so: a version that is not known here keeps its own server, with a warning.
    """
    try:
        ray_replica, unary = _find_ray_internals()
    except _UnknownRayError as error:
        _log.warning(
            "gRPC requests behind HAProxy are served by Ray's own server, which takes more CPU for"
            " each and is slower: expected %s, got Ray %s without it; use a version that has it",
            error,
            _ray_version(),
        )
        return False
    loop = asyncio.get_running_loop()

    async def start_grpc_server(  # the names of the parameters are Ray's
        service_handler_factory: Callable[..., RayHandler],
        grpc_options: Any,
        *,
        event_loop: asyncio.AbstractEventLoop,
        enable_so_reuseport: bool = False,
    ) -> tuple[asyncio.Task[None], ReplicaPort]:
        ray_methods = {
            name: service_handler_factory(
                service_method=f"/{RAY_SERVICE}/{name}", streaming_type=unary
            )
            for name in RAY_METHODS
        }
        port = ReplicaPort(replica, loop, ray_methods)
        await port.start(grpc_options.port)
        return event_loop.create_task(port.wait_for_termination()), port

    ray_replica.start_grpc_server = start_grpc_server
    return True


class _UnknownRayError(Exception):
    """Ray lacks something; the text says what was expected."""


def _find_ray_internals() -> tuple[Any, Any]:
    """The module whose function is replaced, and the type of unary methods.

    Raises _UnknownRayError if either, or the factory of handlers, is not the one of Ray 2.60.
    """
    try:
        from ray.serve._private import replica as ray_replica
    except ImportError as error:
        raise _UnknownRayError(f"the module {_REPLACED}") from error
    function = getattr(ray_replica, "start_grpc_server", None)
    if not inspect.iscoroutinefunction(function) or _signature_of(function) != _SIGNATURE:
        raise _UnknownRayError(f"the coroutine function {_REPLACED}.start_grpc_server{_SIGNATURE}")
    factory = getattr(getattr(ray_replica, "Replica", None), _FACTORY, None)
    if not inspect.isfunction(factory) or _signature_of(factory) != _FACTORY_SIGNATURE:
        raise _UnknownRayError(f"the method {_REPLACED}.Replica.{_FACTORY}{_FACTORY_SIGNATURE}")
    try:
        from ray.serve._private.proxy_request_response import gRPCStreamingType

        return ray_replica, gRPCStreamingType.UNARY_UNARY
    except (ImportError, AttributeError) as error:
        raise _UnknownRayError(_UNARY_TYPE) from error


def _signature_of(function: Callable[..., Any]) -> str:
    """The signature of a function, without its types."""
    signature = inspect.signature(function)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _ray_version() -> str:
    import ray

    return str(ray.__version__)


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
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _Result], seconds: float
) -> _Result:
    """The result of a coroutine that runs on an event loop, of this thread or another one.

    Raises TimeoutError if it has no result after `seconds`, or if the loop has stopped.
    """
    if loop is asyncio.get_running_loop():
        result: Awaitable[_Result] = coroutine
    elif loop.is_running():
        result = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))
    else:
        coroutine.close()
        raise TimeoutError("its event loop has stopped")
    try:
        return await asyncio.wait_for(result, seconds)
    except asyncio.TimeoutError:
        raise TimeoutError(f"its event loop has not answered within {seconds:g} s") from None

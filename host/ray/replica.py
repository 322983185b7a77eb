"""A replica that holds a whole server, for all models of a repository.

Ray Serve calls the methods of the inference protocol by name.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Generic, TypeVar

import ray.util
from ray import serve
from ray.exceptions import RayError
from ray.serve import metrics as serve_metrics

from host.config.schema import is_ensemble
from host.errors import HostError, unavailable
from host.frontends.error_status import RETRY_METADATA
from host.frontends.grpc.grpc_application import GrpcApplication
from host.frontends.grpc.methods import (
    INFERENCE_SERVICE,
    ResponseCallback,
    RpcContext,
    Services,
    UnaryMethod,
)
from host.frontends.http.http_exchange import HttpExchange
from host.frontends.http1.asgi import App, Message, Receive, Send
from host.frontends.inference_core import Cancellable
from host.frontends.receive_memory import ReceiveBudget, ReservedBytes
from host.frontends.request_headers import Header
from host.inference.metadata import ModelStatistics, add_statistics
from host.metrics.families import MetricFamily, MetricKind, Sample
from host.options.options import Options
from host.ray.autoscaling import QUEUE_SECONDS, UNCOUNTED_REQUESTS
from host.ray.channel_messages import ReplicaMethod
from host.ray.channel_server import ChannelAddress, ChannelServer
from host.ray.deployment_options import behind_haproxy, read_options
from host.ray.model_changes import (
    APPLY_CHANGES,
    LIST_STAMPS,
    SEND_CHANGES,
    Failure,
    ModelChange,
    ReplicaStamps,
    SharedModelControl,
)
from host.ray.replica_channels import ReplicaChannels
from host.ray.replica_port import serve_replica_port
from host.ray.sequence_guard import SequenceGuard
from host.ray.servicer import Rpc, list_rpcs, set_status
from host.ray.streams import ResponseBatches, StreamWindow
from host.server.server import Server
from stub.wire.heap import tune_malloc

_log = logging.getLogger("pbhost")


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


_SECONDS = 5.0  # Ray itself exports every ten


class MetricsExporter:
    """Passes the metrics of a server on to Ray every few seconds.

    Ray adds the application, the deployment and the replica to the labels, and `ray_` to the names.
    Counters become Ray's counters, which end with `_total`. The parts of histograms and summaries
    (`_bucket`, `_count`, `_sum`) become gauges with the values as the server has them: Ray counts
    single observations only, which a server does not keep.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[object, ...], float] = {}
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Passes the last values on, and ends."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._export()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            await self._export()

    async def _export(self) -> None:
        try:
            families = await self._server.collect_metrics()
            for family in families:
                for sample in family.samples:
                    self._pass_on(family, sample)
        except Exception:  # requests are worth more than their metrics
            _log.exception("metrics could not be passed on to Ray")

    def _pass_on(self, family: MetricFamily, sample: Sample) -> None:
        name, tags = family.name + sample.suffix, dict(sample.labels)
        if sample.numeric_label is not None:
            label, number = sample.numeric_label
            tags[label] = "+Inf" if number == math.inf else f"{number:g}"
        counts = family.kind is MetricKind.COUNTER
        metric = self._metrics.get(name)
        if metric is None:
            kind = serve_metrics.Counter if counts else serve_metrics.Gauge
            metric = kind(name, description=family.help, tag_keys=tuple(tags))
            self._metrics[name] = metric
        if not counts:
            metric.set(sample.value, tags=tags)
            return
        key = (name, *sorted(tags.items()))
        increase = sample.value - self._last.get(key, 0.0)
        self._last[key] = sample.value
        if increase > 0:
            metric.inc(increase, tags=tags)


_Result = TypeVar("_Result")


class Peers:
    """Calls methods of all replicas of this replica's deployment, itself included.

    `server` and `address`: where this replica takes calls; without an address, all calls go through
    Ray Serve.
    """

    def __init__(self, server: ChannelServer, address: ChannelAddress | None) -> None:
        context = serve.get_replica_context()
        self.own_id: str = context.replica_id.unique_id
        self.configured: int | None = context.world_size
        """The number of replicas that is configured; not what autoscaling has made of it."""
        self.address = address
        self._deployment = context.deployment
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self.channels = ReplicaChannels(lambda: handle, (server, address))

    async def call(
        self, method: ReplicaMethod[_Result], *arguments: object, timeout: float
    ) -> list[_Result]:
        """The results of those that live. Raises HostError UNAVAILABLE if one does not answer."""
        try:
            return await self.channels.call_all(method, *arguments, timeout=timeout)
        except TimeoutError:
            raise unavailable(
                f"not all replicas of deployment '{self._deployment}' answered '{method.name}'"
                f" within {timeout:g} s"
            ) from None
        except RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1]
            raise unavailable(
                f"a replica of deployment '{self._deployment}' failed to answer '{method.name}':"
                f" {type(error).__name__}: {reason}"
            ) from error


async def listen(server: ChannelServer) -> ChannelAddress | None:
    """The address of this replica; None if there can be none, so that all goes through Ray."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return None  # these connections are not encrypted, and Ray's are
    try:
        return await server.start(ray.util.get_node_ip_address())
    except OSError as error:
        _log.warning("no port for requests of other replicas, which go through Ray: %s", error)
        return None


_MENDING_SECONDS = 60.0
"""How long a server may try to restart the instances of a model before Ray replaces it."""

_LOAD_SECONDS = 600.0
_STATISTICS_SECONDS = 10.0

INFER_PATH = f"/{INFERENCE_SERVICE}/ModelInfer"

OWN_STATISTICS = ReplicaMethod[list[ModelStatistics]](
    "own_statistics", tuple[str, str], list[ModelStatistics]
)


class ServerReplica(RpcMethods):
    """One server in one replica. `arguments`: see `host.ray.deployment_options`.

    Ray Serve calls `check_health`, `reconfigure` and `record_autoscaling_stats`.
    """

    methods_for_replicas: tuple[ReplicaMethod[Any], ...] = (
        APPLY_CHANGES, LIST_STAMPS, OWN_STATISTICS, SEND_CHANGES,
    )  # fmt: skip
    """What other replicas call."""

    routes_sequences = False
    """Whether requests of a sequence are sent on to one replica of another deployment."""

    reached_by_clients = True
    """Whether HAProxy sends requests here: Ray opens ports in the deployment of the ingress."""

    async def __init__(self, arguments: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._channel_server = ChannelServer(
            lambda request, headers: self._server.own_models.infer(request, headers),
            lambda message, metadata, done: self.rpcs.start_infer(message, metadata, done),
            {method: getattr(self, method.name) for method in self.methods_for_replicas},
        )
        tune_malloc()  # keeps freed memory; Ray Serve itself freezes what the collector visits
        self._declared: set[str] | None = None  # models that `user_config` names
        self._failing_since: dict[tuple[str, int], float] = {}
        self._queue = (0, 0.0)  # what queues had counted when last asked
        async with AsyncExitStack() as opened:  # closed if the start fails or is cancelled
            await self._open(arguments, opened)
            self._opened = opened.pop_all()
        self._peers.channels.counted = True
        self._guard = SequenceGuard(self._server.core)
        self._several = self._peers.configured != 1
        self.rpcs = self._server.grpc_application
        self._has_port = self.reached_by_clients and behind_haproxy() and serve_replica_port(self)

    async def _open(self, arguments: Mapping[str, Any], opened: AsyncExitStack) -> None:
        """Starts the server and what it needs; `opened` closes them in the opposite order."""
        opened.push_async_callback(self._channel_server.close)
        self._peers = Peers(self._channel_server, await listen(self._channel_server))
        opened.callback(self._peers.channels.close)
        self._control = SharedModelControl(self._peers, _LOAD_SECONDS)
        self._server = self.make_server(read_options(arguments))
        await self._server.start()
        opened.push_async_callback(self._server.stop)
        self._metrics = MetricsExporter(self._server)
        opened.push_async_callback(self._metrics.stop)
        opened.push_async_callback(self._control.stop)
        self._control.server = self._server
        await self._control.catch_up()

    @property
    def _guards(self) -> bool:
        return self._several and not self.routes_sequences

    def make_server(self, options: Options) -> Server:
        """The server of this replica."""
        return Server(
            options, control_hook=self._control, collect_statistics=self._collect_statistics
        )

    async def call_rpc(self, path: str, message: bytes, metadata: Sequence[Header]) -> bytes:
        """As that of the base class, but refuses requests that belong to another replica."""
        if self._guards and path == INFER_PATH:
            self._guard.check_rpc(message, metadata)
        return await super().call_rpc(path, message, metadata)

    def services(self) -> Services:
        """The gRPC methods, for the port of this replica."""
        services = self.rpcs.services()
        others = [one for one in services[INFERENCE_SERVICE] if one.name != "ModelInfer"]
        return {**services, INFERENCE_SERVICE: [self.infer_method(), *others]}

    def infer_method(self) -> UnaryMethod:
        """ModelInfer as `call_rpc` answers it."""

        def start(
            message: bytes,
            done: ResponseCallback,
            context: RpcContext,
            reserved: ReservedBytes | None,
        ) -> Cancellable:
            if self._guards:
                self._guard.check_rpc(message, context.invocation_metadata())
            return self.rpcs.start_infer(message, context.invocation_metadata(), done, reserved)

        return UnaryMethod("ModelInfer", self._infer, "inference", start)

    async def _infer(self, message: bytes, context: RpcContext) -> bytes:
        return await self.call_rpc(INFER_PATH, message, context.invocation_metadata())

    async def answer_http(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers an HTTP request, an ASGI application."""
        if self._guards and scope["type"] == "http":
            try:
                self._guard.check_http(scope)
            except HostError as error:
                await HttpExchange(scope, receive, send, ReceiveBudget()).send_error(error)
                return
        await self._server.asgi_application(scope, receive, send)

    def __serve_build_asgi_app__(self) -> App:  # the name is Ray's
        return _WithShutdown(self)

    async def stop(self) -> None:
        """Finishes requests in progress, and stops the server."""
        self._channel_server.say_goodbye()
        await self._opened.aclose()

    async def check_health(self) -> None:
        """Raises RuntimeError if a model that was ready has had no instance for a minute.

        The server restarts instances itself; Ray Serve replaces a replica that stays ill.
        """
        self._several = await self._control.start_to_catch_up() > 1 or self._several
        core, now = self._server.core, time.monotonic()
        failing: dict[tuple[str, int], float] = {}
        for name, version in self._server.own_models.ready_versions():
            try:
                if is_ensemble(core.model_config(name, str(version))):
                    continue  # it has no instances; those of its steps count
                ready = await core.health.model_ready(name, str(version))
            except HostError:
                continue  # it was unloaded meanwhile
            if not ready:
                failing[name, version] = self._failing_since.get((name, version), now)
        self._failing_since = failing
        for (name, version), since in failing.items():
            if now - since > _MENDING_SECONDS:
                raise RuntimeError(
                    f"version {version} of model '{name}' has not been ready for"
                    f" {now - since:.0f} s:\n{self._server.model_table()}"
                )

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Loads the models of `load_model` in `user_config`, and unloads those it named before.

        Ray Serve calls this in each replica, without a new one. Raises ValueError for other keys.
        """
        unknown = set(user_config) - {"load_model"}
        if unknown:
            raise ValueError(f"user_config: expected 'load_model' only, got {sorted(unknown)}")
        wanted = set(user_config.get("load_model", ()))
        missing = wanted - self.present_models()
        if self._declared is None:  # a new replica: what clients have changed since comes first
            missing -= self._control.changes.keys()
        for name in sorted(missing):
            async with self._control.turn(name):
                await self._server.load_model(name)
                self._control.record(name, loaded=True)
        for name in sorted((self._declared or set()) - wanted):
            await self._server.unload_model(name)
            self._control.record(name, loaded=False)
        self._declared = wanted

    def present_models(self) -> set[str]:
        """The models that `reconfigure` need not load."""
        return {name for name, _ in self._server.own_models.ready_versions()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The mean time in queues since the last call; of requests that still wait, if longer.

        And the requests in progress that Ray Serve does not count.
        """
        state = self._server.queue_state()
        executed, waited_s = self._queue
        self._queue = (state.executed, state.waited_s)
        count = state.executed - executed
        mean = (state.waited_s - waited_s) / count if count > 0 else 0.0
        uncounted = float(self.uncounted_requests())
        return {QUEUE_SECONDS: max(mean, state.oldest_s), UNCOUNTED_REQUESTS: uncounted}

    def uncounted_requests(self) -> int:
        """Requests in progress that Ray Serve does not count."""
        direct = self.rpcs.open_requests if self._has_port else 0
        return direct + self._channel_server.ongoing

    async def call_method(self, name: str, arguments: Sequence[object]) -> Any:
        """The result of one of `methods_for_replicas`, or a Refusal, through Ray Serve."""
        return await self._channel_server.answer_ray(name, arguments)

    async def exchange_address(self, other: ChannelAddress | None) -> ChannelAddress | None:
        """Where this replica takes calls of others; None if it does not.

        `other`: the address of the caller, if it is a replica of the same deployment.
        """
        if other is not None:
            self._peers.channels.learn(other)
        return self._peers.address

    async def apply_changes(self, changes: list[ModelChange]) -> Failure | None:
        """Makes loads and unloads of another replica here too."""
        return await self._control.apply(changes)

    async def list_stamps(self) -> ReplicaStamps:
        """The stamp of the last load or unload of each model that clients have asked for."""
        return self._control.list_stamps()

    async def send_changes(self, wanted: Mapping[str, str]) -> list[ModelChange]:
        """Those loads and unloads that another replica wants of this one."""
        return self._control.select_changes(wanted)

    async def own_statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """The statistics of this replica alone; empty if it has no such model."""
        try:
            return self._server.core.statistics(name, version)
        except HostError:
            return []

    async def _collect_statistics(self, name: str, version: str) -> list[ModelStatistics]:
        own = self._server.core.statistics(name, version)  # raises for a wrong name
        call = self._peers.call(OWN_STATISTICS, name, version, timeout=_STATISTICS_SECONDS)
        return add_statistics(await call) or own


class _WithShutdown:
    """The HTTP endpoints; the end of their lifespan stops the server."""

    def __init__(self, replica: ServerReplica) -> None:
        self._replica = replica

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._replica.answer_http(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._replica.stop()
        await send({"type": "lifespan.shutdown.complete"})


Replica = serve.ingress()(ServerReplica)
"""The class of the deployment: Ray Serve finds methods for gRPC, and the HTTP endpoints."""

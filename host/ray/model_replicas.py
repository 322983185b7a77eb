"""The replicas of an application with one deployment per model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import ray
from ray import serve

from host.errors import HostError
from host.frontends.grpc.methods import UnaryMethod
from host.frontends.request_headers import Header
from host.inference.metadata import IndexEntry, ModelStatistics
from host.model_control.control import LoadParameters
from host.options.options import Options
from host.ray.channel_messages import (
    PackedResponse,
    PackedVersion,
    Refusal,
    RequestHead,
    pack_response,
    pack_version,
    unpack_request,
)
from host.ray.model_connection import (
    DESCRIBE_MODEL,
    INDEX_ENTRIES,
    IS_READY,
    LOAD_FOR_CLIENT,
    MODEL_STATISTICS,
    REFRESH_MODEL,
    UNLOAD_FOR_CLIENT,
    Connection,
    RoutedModelControl,
)
from host.ray.model_deployments import keep_one_gpu
from host.ray.replica import INFER_PATH, ServerReplica
from host.server.server import Server


class ConnectedReplica(ServerReplica):
    """A server whose models call those of other deployments.

    `model`: its own one, "" for none. `deployments`: the names of deployments by model.
    """

    routes_sequences = True
    methods_for_replicas = (*ServerReplica.methods_for_replicas, REFRESH_MODEL)

    async def __init__(  # type: ignore[misc]
        self, arguments: Mapping[str, Any], model: str, deployments: Mapping[str, str]
    ) -> None:
        self._started = False
        self._model = model
        self._asking: asyncio.Task[None] | None = None
        context = serve.get_replica_context()
        self._connection = Connection(deployments, model, context.app_name)
        try:
            await super().__init__(arguments)
        except BaseException:  # also a cancelled start leaves no connection
            self._connection.close()
            raise
        self._started = True

    async def stop(self) -> None:
        """As that of the base class; closes the connections to other deployments."""
        await super().stop()
        self._connection.close()

    def make_server(self, options: Options) -> Server:
        """A server with remote models, whose loads and unloads go to their deployments.

        The statistics of remote models are sums of all replicas already. With one GPU, it has the
        instance groups of one GPU: other replicas have the others.
        """
        own = self._control if self._model else None
        control = RoutedModelControl(self._connection, own, self._model)
        one_gpu = len(ray.get_runtime_context().get_accelerator_ids()["GPU"]) == 1
        return Server(
            options,
            control_hook=control,
            remote_models=self._connection,
            adapt_config=keep_one_gpu if one_gpu else None,
        )

    async def refresh_model(self, name: str) -> None:
        """Asks again for the versions of a model of another deployment."""
        try:
            changed = await self._server.refresh_remote_model(name)
        except HostError:
            return  # it has gone again; the next request finds out
        if changed:  # an ensemble that uses it, and may be a step of another one
            await self._connection.announce(self._model)


class ModelReplica(ConnectedReplica):
    """A server with one model, or one ensemble whose steps are in other deployments.

    Other deployments call its methods.
    """

    reached_by_clients = False
    methods_for_replicas = (
        *ConnectedReplica.methods_for_replicas,
        DESCRIBE_MODEL, INDEX_ENTRIES, IS_READY, LOAD_FOR_CLIENT, MODEL_STATISTICS,
        UNLOAD_FOR_CLIENT,
    )  # fmt: skip

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """As that of the base class; ensembles learn of a change."""
        first = self._declared is None
        if first and self._model not in self._control.changes:
            self._declared = {self._model}  # as the start has loaded it
        await super().reconfigure(user_config)
        if not first:
            await self._connection.announce(self._model)

    def present_models(self) -> set[str]:
        """Also an ensemble that waits for a step: it is loaded when that returns."""
        return super().present_models() | self._server.waiting_ensembles().keys()

    async def check_health(self) -> None:
        """As that of the base class; an ensemble that waits asks for its steps again."""
        await super().check_health()
        waiting = self._server.waiting_ensembles()
        if waiting and (self._asking is None or self._asking.done()):
            # This replica may have started too late to be notified of a load.
            steps = {step for missing in waiting.values() for step in missing}
            self._asking = asyncio.create_task(self._ask_for(sorted(steps)))

    async def _ask_for(self, models: Sequence[str]) -> None:
        for name in models:
            await self.refresh_model(name)

    async def answer_request(
        self, head: RequestHead, *buffers: Any
    ) -> list[PackedResponse] | Refusal:
        """All responses to a request; a Refusal is an error, as Ray would wrap it."""
        request = unpack_request(head, buffers)
        try:
            async with aclosing(self._server.own_models.infer(request, head.headers)) as responses:
                return [pack_response(response, final) async for response, final in responses]
        except HostError as error:
            return Refusal.from_error(error)

    async def stream_responses(
        self, head: RequestHead, *buffers: Any
    ) -> AsyncIterator[PackedResponse | Refusal]:
        """Yields the responses to a request."""
        request = unpack_request(head, buffers)
        try:
            async with aclosing(self._server.own_models.infer(request, head.headers)) as responses:
                async for response, final in responses:
                    yield pack_response(response, final)
        except HostError as error:
            yield Refusal.from_error(error)

    async def describe_model(self) -> list[PackedVersion]:
        """The loaded versions of the model."""
        return list(map(pack_version, await self._server.own_models.describe(self._model)))

    async def model_statistics(self, version: str) -> list[ModelStatistics]:
        """The statistics of the model in this replica."""
        return await self._server.own_models.statistics(self._model, version)

    async def index_entries(self, ready: bool) -> Sequence[IndexEntry]:
        """The versions of the model."""
        entries = await self._server.own_models.index(ready)
        return [entry for entry in entries if entry.name == self._model]

    async def is_ready(self) -> bool:
        """Whether the model is ready, or unloaded on purpose."""
        return await self._server.own_models.ready()

    async def load_for_client(self, parameters: LoadParameters) -> None:
        """Loads the model in all replicas of the deployment."""
        await self._server.core.control.load_model(self._model, parameters)

    async def unload_for_client(self, unload_dependents: bool) -> None:
        """Unloads the model in all replicas of the deployment."""
        await self._server.core.control.unload_model(self._model, unload_dependents)

    async def __del__(self) -> None:  # Ray Serve awaits it as the replica ends
        if self._started:
            await self.stop()


class IngressReplica(ConnectedReplica):
    """A server without a model of its own, which clients reach."""

    async def __init__(  # type: ignore[misc]
        self, arguments: Mapping[str, Any], deployments: Mapping[str, str], *bound: object
    ) -> None:
        """`bound`: the other deployments; Ray Serve deploys what is bound to the ingress."""
        self._forwarding = 0
        await super().__init__(arguments, "", deployments)
        self._counts_clients = bool(self._server.options.api_key_file)

    async def call_rpc(self, path: str, message: bytes, metadata: Sequence[Header]) -> bytes:
        """As that of the base class, but passes requests on undecoded where that is possible."""
        if path == INFER_PATH and not (self._counts_clients or self._server.core.handles_requests):
            self._forwarding += 1
            try:
                answer = await self._connection.forward_infer(message, metadata)
            finally:
                self._forwarding -= 1
            if answer is not None:
                return answer
        return await super().call_rpc(path, message, metadata)

    def infer_method(self) -> UnaryMethod:
        """As that of the base class, but a request may be waited for."""
        return dataclasses.replace(super().infer_method(), callback_handler=None)

    def uncounted_requests(self) -> int:
        """As that of the base class, with those that are passed on."""
        return super().uncounted_requests() + (self._forwarding if self._has_port else 0)


Ingress = serve.ingress()(IngressReplica)
"""The class of the deployment: Ray Serve finds methods for gRPC, and the HTTP endpoints."""

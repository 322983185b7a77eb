"""The models of other deployments, as one deployment reaches them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from host.errors import ErrorCode, HostError, internal, unavailable
from host.frontends.grpc.infer_request import read_model_name
from host.frontends.request_headers import Header
from host.inference.metadata import IndexEntry, ModelStatistics, add_statistics
from host.inference.request import InferRequest
from host.model_control.control import LoadParameters, ModelControlHook
from host.ray.channel_client import Channel, ChannelLostError, NotTakenError
from host.ray.channel_messages import (
    LARGE_BYTES,
    PackedVersion,
    Refusal,
    ReplicaMethod,
    checked,
    pack_request,
    unpack_response,
    unpack_version,
)
from host.ray.model_deployments import INGRESS
from host.ray.replica_channels import ReplicaChannels
from host.ray.waiting_requests import WaitingRequests
from host.remote_models import RemoteVersion, ResponseStream
from pb_utils import _model_texts as texts

_log = logging.getLogger("pbhost")


DESCRIBE_MODEL = ReplicaMethod[list[PackedVersion]](
    "describe_model", tuple[()], list[PackedVersion]
)
INDEX_ENTRIES = ReplicaMethod[list[IndexEntry]]("index_entries", tuple[bool], list[IndexEntry])
IS_READY = ReplicaMethod[bool]("is_ready", tuple[()], bool)
LOAD_FOR_CLIENT = ReplicaMethod[None]("load_for_client", tuple[dict[str, Any]], None)
MODEL_STATISTICS = ReplicaMethod[list[ModelStatistics]](
    "model_statistics", tuple[str], list[ModelStatistics]
)
REFRESH_MODEL = ReplicaMethod[None]("refresh_model", tuple[str], None)
UNLOAD_FOR_CLIENT = ReplicaMethod[None]("unload_for_client", tuple[bool], None)

_QUESTION_SECONDS = 10.0
LOAD_SECONDS = 600.0
_MAX_DIRECT_BYTES = 1 << 30
"""Bytes of tensors from which on no request goes by a connection, whose frames have a limit."""


class Connection:
    """A `RemoteModelProvider` over Ray Serve, and the way to load and unload remote models.

    `deployments`: the name of each model's deployment. `own`: the model of this one, "" for none.
    """

    def __init__(self, deployments: Mapping[str, str], own: str, application: str) -> None:
        self._deployments = {model: name for model, name in deployments.items() if model != own}
        self._application = application
        self._handles: dict[str, DeploymentHandle] = {}
        self._decoupled: dict[str, bool] = {}
        self._entries: dict[str, Sequence[IndexEntry]] = {}  # the last ones, for busy deployments
        self._silent: set[str] = set()  # models whose statistics could not be had
        self._waiting = WaitingRequests(self._has_replica)
        self._channels: dict[str, ReplicaChannels] = {}
        self._ingress = ReplicaChannels(
            lambda: serve.get_deployment_handle(INGRESS, self._application)
        )

    def serves(self, name: str) -> bool:
        """Whether another deployment has the model."""
        return name in self._deployments

    async def describe(self, name: str) -> Sequence[RemoteVersion]:
        """The versions of a model that are loaded now. Raises HostError."""
        # The caller waits as long as it likes: a deployment that starts answers when it is ready.
        packed = await self._ask(name, DESCRIBE_MODEL, timeout=LOAD_SECONDS)
        described = list(map(unpack_version, packed))
        self._decoupled[name] = any(
            one.config.model_transaction_policy.decoupled for one in described
        )
        return described

    async def forward_infer(self, message: bytes, metadata: Sequence[Header]) -> bytes | None:
        """The answer of a replica to a ModelInfer of a client. Raises HostError.

        None if the message has to be decoded here: it is large or in a sequence, or there is no
        connection to a replica of its model.
        """
        if len(message) >= LARGE_BYTES or b"sequence_id" in message:
            return None
        model = read_model_name(message)
        if model not in self._deployments:
            return None
        channel = self._replicas(model).choose()
        if channel is None:
            return None
        try:
            return await channel.answer_rpc(message, metadata)
        except NotTakenError:
            return None
        except ChannelLostError:
            raise _replica_died(model) from None

    async def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Yields the responses to a request. Raises HostError.

        Small requests, and all to decoupled models, go directly to a replica, if there is a
        connection; others by a handle, whose responses do not wait for a slow reader.
        """
        packed = pack_request(request, headers)
        decoupled = self._decoupled.get(request.model_name, True)
        most = _MAX_DIRECT_BYTES if decoupled else LARGE_BYTES
        if not request.correlation_id and sum(map(len, packed[1:])) < most:
            replicas = self._replicas(request.model_name)
            channel = await replicas.choose_or_connect() if decoupled else replicas.choose()
            if channel is not None:
                try:
                    async with aclosing(_ask_directly(channel, request, packed)) as responses:
                        async for answer in responses:
                            yield answer
                    return
                except NotTakenError:
                    pass  # Ray knows the other replicas
        async with aclosing(self._infer_by_handle(request, packed)) as responses:
            async for answer in responses:
                yield answer

    async def _infer_by_handle(
        self, request: InferRequest, packed: tuple[Any, ...]
    ) -> ResponseStream:
        handle = self._handle(request.model_name)
        if request.correlation_id:  # the router keeps it on one replica
            session = f"{request.model_name}/{request.correlation_id}"
            handle = handle.options(session_id=session)
        if self._decoupled.get(request.model_name, True):
            responses = handle.options(stream=True).stream_responses.remote(*packed)
        else:
            responses = _SingleAnswer(handle.answer_request.remote(*packed))
        waiting = self._waiting.add(request.model_name, responses.cancel)
        ended = False
        try:
            async for answer in responses:
                if isinstance(answer, Refusal):
                    ended = True
                    raise answer.to_error()
                response, ended = unpack_response(answer)
                yield response, ended
            ended = True
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            if waiting.given_up:
                raise unavailable(
                    f"the deployment of model '{request.model_name}' has had no replica for a"
                    " minute; `serve status` says why"
                ) from None
            if isinstance(error, asyncio.CancelledError):
                raise
            ended = True
            raise _lost(request.model_name, error) from error
        finally:
            self._waiting.discard(waiting)
            if not ended:
                responses.cancel()

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """The sum over the replicas of a model; of all models without a name. Raises HostError."""
        if name:
            parts = await self._ask_all(name, MODEL_STATISTICS, version)
            return add_statistics(parts)
        found = await asyncio.gather(
            *(self.statistics(one, "") for one in self._deployments), return_exceptions=True
        )
        parts = []
        for one, part in zip(self._deployments, found, strict=True):
            if not isinstance(part, BaseException):
                self._silent.discard(one)
                parts += part
            elif isinstance(part, HostError):
                if one not in self._silent:  # clients may ask each second
                    _log.warning("statistics lack model '%s': %s", one, part.message)
                self._silent.add(one)
            else:
                raise part
        return parts

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The entries of all models, and UNAVAILABLE for a deployment without a replica.

        A deployment too busy to answer has its last known entries.
        """
        parts = await asyncio.gather(*map(self._index_of, self._deployments))
        return [one for part in parts for one in part if not ready or one.state == "READY"]

    async def _index_of(self, name: str) -> Sequence[IndexEntry]:
        try:
            answers = await self._ask_all(name, INDEX_ENTRIES, False)
        except _Busy as error:
            return self._entries.get(name) or [IndexEntry(name, "", "UNAVAILABLE", error.message)]
        except HostError as error:
            return [IndexEntry(name, "", "UNAVAILABLE", error.message)]
        if not answers:
            return [IndexEntry(name, "", "UNAVAILABLE", "its deployment has no replica now")]
        entries: Sequence[IndexEntry] = answers[0]
        self._entries[name] = entries
        return entries

    async def ready(self) -> bool:
        """Whether a replica of each model is ready. One too busy to answer counts as ready."""
        answers = await asyncio.gather(*map(self._is_ready, self._deployments))
        return all(answers)

    async def _is_ready(self, name: str) -> bool:
        try:
            return any(await self._ask_all(name, IS_READY))
        except _Busy:
            return True
        except HostError:
            return False

    async def _has_replica(self, name: str) -> bool:
        try:
            return bool(await self._ask_all(name, IS_READY))
        except HostError:
            return True  # it is busy, or ends

    async def load_model(self, name: str, parameters: LoadParameters) -> None:
        """Loads a model in its deployment. Raises HostError."""
        await self._ask(name, LOAD_FOR_CLIENT, dict(parameters), timeout=LOAD_SECONDS)

    async def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Unloads a model in its deployment. Raises HostError."""
        await self._ask(name, UNLOAD_FOR_CLIENT, unload_dependents, timeout=LOAD_SECONDS)

    async def announce(self, name: str) -> None:
        """Tells all other deployments that the versions of a model have changed."""
        told = (
            channels.call_all(REFRESH_MODEL, name, timeout=_QUESTION_SECONDS)
            for channels in (self._ingress, *map(self._replicas, self._deployments))
        )
        for answer in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(answer, BaseException):
                _log.warning("cannot notify a deployment about model '%s': %s", name, answer)

    def _replicas(self, name: str) -> ReplicaChannels:
        channels = self._channels.get(name)
        if channels is None:
            channels = ReplicaChannels(lambda: self._handle(name))
            self._channels[name] = channels
        return channels

    def close(self) -> None:
        """Closes the connections to replicas."""
        for channels in (self._ingress, *self._channels.values()):
            channels.close()

    def _handle(self, name: str) -> DeploymentHandle:
        handle = self._handles.get(name)
        if handle is None:
            deployment = self._deployments[name]
            handle = serve.get_deployment_handle(deployment, self._application)
            self._handles[name] = handle
        return handle

    async def _ask(
        self,
        name: str,
        method: ReplicaMethod[Any],
        *arguments: object,
        timeout: float = _QUESTION_SECONDS,
    ) -> Any:
        """The answer of one replica. Raises HostError."""
        try:
            return await self._replicas(name).call_one(method, *arguments, timeout=timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise unavailable(
                f"the deployment of model '{name}' did not answer within {timeout:g} s"
            ) from None
        except (RayError, RayServeException) as error:
            raise _lost(name, error) from error

    async def _ask_all(
        self, name: str, method: ReplicaMethod[Any], *arguments: object
    ) -> list[Any]:
        """The answers of all replicas. Raises HostError."""
        try:
            return await self._replicas(name).call_all(
                method, *arguments, timeout=_QUESTION_SECONDS
            )
        except TimeoutError:
            text = f"the deployment of model '{name}' did not answer within {_QUESTION_SECONDS:g} s"
            raise _Busy(ErrorCode.UNAVAILABLE, text) from None
        except (RayError, RayServeException) as error:
            raise _lost(name, error) from error


async def _ask_directly(
    channel: Channel, request: InferRequest, packed: tuple[Any, ...]
) -> ResponseStream:
    """Yields the responses of the replica at a connection. Raises HostError and NotTakenError."""
    head, *buffers = packed
    try:
        async with aclosing(channel.infer(head, buffers)) as answers:
            async for answer in answers:
                response, final, tensors = checked(answer)
                yield unpack_response((response, final, *tensors))
    except ChannelLostError:
        raise _replica_died(request.model_name) from None


def _replica_died(model: str) -> HostError:
    return unavailable(
        f"the replica of model '{model}' that ran this request has died; another one answers, if"
        " the request may be sent again"
    )


class _Busy(HostError):
    """The replicas of a deployment live, and did not answer in time.

    Ray Serve lets questions wait for a place among the requests.
    """


class _SingleAnswer:
    """The response to a call, as a stream of the parts of its result."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[Any]:
        answer = await self._response
        for part in [answer] if isinstance(answer, Refusal) else answer:
            yield part

    def cancel(self) -> None:
        self._response.cancel()


def _lost(name: str, error: Exception) -> HostError:
    """The error for the caller: a defect of the replica, or its end."""
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else ''}"
    if type(error).__name__.startswith("RayTaskError"):
        _log.error("unexpected failure of the deployment of model '%s'", name, exc_info=error)
        return internal(f"unexpected failure of the deployment of model '{name}': {reason}")
    return unavailable(f"the deployment of model '{name}' cannot answer: {reason}")


class RoutedModelControl:
    """A `ModelControlHook`: each load and unload happens in the deployment of its model.

    `own`: the hook for the model of this deployment, and its name; None in the ingress.
    """

    def __init__(
        self, connection: Connection, own: ModelControlHook | None = None, name: str = ""
    ) -> None:
        self._connection = connection
        self._own = own
        self._name = name

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Loads or reloads a model in all replicas of its deployment. Raises HostError."""
        if self._own is not None and name == self._name:
            await self._own.load(name, parameters, load_here)
            await self._connection.announce(name)
        elif self._connection.serves(name):
            await self._connection.load_model(name, parameters)
        else:
            _log.error(
                "failed to load '%s': it has no deployment; models that are new in the repository"
                " need a new deployment of the application",
                name,
            )
            raise internal(texts.failed_load(name))

    async def unload(
        self, name: str, unload_dependents: bool, unload_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Unloads a model in all replicas of its deployment. Raises HostError."""
        if self._own is not None and name == self._name:
            await self._own.unload(name, unload_dependents, unload_here)
            await self._connection.announce(name)
        elif self._connection.serves(name):
            await self._connection.unload_model(name, unload_dependents)

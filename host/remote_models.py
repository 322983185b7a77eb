"""Models that other processes serve: how they are reached, and how they are among the others."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError, internal, unavailable, unexpected_failure
from host.inference.call import Call, CallHolder
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest, InferResponse, copy_from_shared_memory
from host.instances.regions import write_outputs
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import InferenceCounters
from host.models.draining import DrainableModel
from host.models.registry import (
    Extensions,
    ModelEntry,
    ModelVersion,
    OnDemand,
    Registry,
    VersionState,
)

ResponseStream = AsyncGenerator[tuple[InferResponse | None, bool], None]
"""Each response, and whether it is the last one; None is an end without a response."""


@dataclass(frozen=True, slots=True)
class RemoteVersion:
    """A version of a model that another server has loaded.

    Attributes:
        version: Its number.
        config: Its complete configuration.
        labels: Names of classes, by output.
        defines_is_ready: Whether the model defines `is_ready`.
        reason: Why it is not ready; "" if it is.
    """

    version: int
    config: ModelConfig
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defines_is_ready: bool = False
    reason: str = ""


class RemoteModelProvider(Protocol):
    """Connects a server with the models of others. All methods run on the server's event loop.

    The server asks only when it needs an answer: `describe` at the first request for a model and
    whenever a client wants to know about it, never at the start unless an ensemble needs it. So
    servers whose models call each other can start in any order.
    """

    def serves(self, name: str) -> bool:
        """Whether the model belongs to another server, loaded or not. Must not block.

        Such a model is never loaded in this server.
        """

    async def describe(self, name: str) -> Sequence[RemoteVersion]:
        """The versions of a model that are loaded now. Raises HostError."""

    def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Sends a request to the model; yields its responses in order. Raises HostError.

        `headers`: the W3C trace context, for the other server. Closing the stream cancels the
        request. The memory of the tensors is valid until the stream has ended.
        """

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """The statistics of a model, all of its servers together. Raises HostError.

        `version`: "" for all.
        """

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The entries of all remote models in the repository index. Raises HostError.

        `ready`: only of the versions that are ready.
        """

    async def ready(self) -> bool:
        """Whether all remote models are ready that should be."""


WINDOW_BYTES = 4 << 20
"""Bytes of tensors of one request's responses from which on the next one waits."""


class ResponseWindow:
    """Lets the next response wait while too many are not acknowledged. Belongs to one event loop.

    `most`: responses from which on the next one waits, if `WINDOW_BYTES` of them do not suffice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: deque[int] = deque()  # of the responses that are not acknowledged
        self._bytes = 0
        self._changed = asyncio.Event()

    def sent(self, size: int) -> None:
        """Counts a response with `size` bytes of tensors."""
        self._sizes.append(size)
        self._bytes += size

    def acknowledge(self, count: int = 1) -> None:
        """The receiver has taken the oldest ones."""
        for _ in range(min(count, len(self._sizes))):
            self._bytes -= self._sizes.popleft()
        self._changed.set()

    async def wait(self) -> None:
        """Returns once another response may be sent."""
        while len(self._sizes) >= self._most or self._bytes >= WINDOW_BYTES:
            self._changed.clear()
            await self._changed.wait()


_SETTLED_NS = 1_000_000_000
"""A model that asks another one without waiting for it has probably responded by then."""


class ReturningCalls:
    """Tells which calls of other servers were made for a call to a remote model.

    A request names the calls to remote models that it was made for (`InferRequest.ancestors`), in
    whichever servers. So the deadlock detector sees a request that waits for itself, although
    other servers are in between. Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._server = secrets.token_hex(8)
        self._last = 0
        self._returned: dict[str, dict[Call, None]] = {}

    def add_outgoing(self) -> str:
        """Returns an id for a call to a remote model."""
        self._last += 1
        name = f"{self._server}/{self._last}"
        self._returned[name] = {}
        return name

    def remove_outgoing(self, name: str) -> None:
        """To be called when the call has ended."""
        del self._returned[name]

    @contextmanager
    def incoming(self, call: Call) -> Iterator[None]:
        """Within the block, the call of another server is in progress."""
        waiting = [
            self._returned[name] for name in call.request.ancestors if name in self._returned
        ]
        for calls in waiting:
            calls[call] = None
        try:
            yield
        finally:
            for calls in waiting:
                calls.pop(call, None)

    def made_for(self, name: str) -> Sequence[Call]:
        """The calls that have arrived for an outgoing call, and that it may wait for."""
        settled = time.monotonic_ns() - _SETTLED_NS
        return [call for call in self._returned.get(name, ()) if call.received_ns < settled]


_log = logging.getLogger("pbhost")

_MAX_UNACKNOWLEDGED = 32  # responses of one request, unless the caller has another limit
_GIVE_UP_SECONDS = 5.0  # for the provider to close a request


class RemoteModel(DrainableModel):
    """Passes requests on. The other server validates, schedules and counts them."""

    def __init__(
        self,
        described: RemoteVersion,
        provider: RemoteModelProvider,
        why_not_ready: Callable[[str, int], Awaitable[str]],
        returning: ReturningCalls,
    ) -> None:
        super().__init__()
        config = described.config
        self.name: str = config.name
        self.version = described.version
        self.config = config
        self.labels: Mapping[str, Sequence[str]] = described.labels
        self.extensions: Extensions = {}
        self.counters = InferenceCounters(self.name, str(self.version))
        self.metrics = ModelMetrics(
            config, self.version, self.counters, lambda: 0, MetricsSettings()
        )
        self.observes_responses = self.metrics.latencies is not None
        self.described = described
        self._provider = provider
        self._why_not_ready = why_not_ready
        self._returning = returning
        self._tasks: dict[Call, asyncio.Task[None]] = {}

    def infer(self, request: InferRequest) -> Call:
        """Starts a request. Errors are responses, as the other server finds them."""
        self._raise_if_draining(request)
        call = Call(request)
        self._track_call(call)
        name = self._returning.add_outgoing()
        task = asyncio.get_running_loop().create_task(self._run(call, name))
        call.holder = _PassedOnCall(task, partial(self._returning.made_for, name))
        self._tasks[call] = task
        task.add_done_callback(lambda _: self._task_ended(call, name))
        return call

    def _task_ended(self, call: Call, name: str) -> None:
        call.holder = None  # breaks a reference cycle
        del self._tasks[call]
        self._returning.remove_outgoing(name)

    async def _run(self, call: Call, name: str) -> None:
        try:
            await self._pass_on(call, name)
            if not call.ended:
                call.fail(internal(f"the server of model '{self.name}' ended without a response"))
        except asyncio.CancelledError:
            if not call.ended:
                call.fail(unavailable(f"the request to model '{self.name}' was given up"))
            raise
        except HostError as error:
            if not call.ended:
                call.fail(error)
        except Exception as error:  # the top of a call: a defect is logged and answered
            _log.exception("unexpected failure of a request to remote model '%s'", self.name)
            if not call.ended:
                call.fail(unexpected_failure(error))

    async def _pass_on(self, call: Call, name: str) -> None:
        request = call.request
        headers = {} if request.trace is None else request.trace.headers_for_server()
        sent = msgspec.structs.replace(
            request,
            inputs=[copy_from_shared_memory(tensor) for tensor in request.inputs],
            trace=None,
            output_placement=None,
            output_placement_hints=None,
            classification=None,
            shape=None,
            reserved_memory=None,
            ancestors=[*request.ancestors, name],
        )
        placement = request.output_placement
        window = ResponseWindow(request.max_outstanding_responses or _MAX_UNACKNOWLEDGED)
        call.on_response_acknowledged = lambda _: window.acknowledge()
        responses = self._provider.infer(sent, headers)
        try:
            async for response, final in responses:
                if response is not None:
                    response.id = request.id
                    if placement is not None and response.error is None:
                        response.error = write_outputs(placement, response.outputs)
                        if response.error is not None:
                            response.outputs = []
                    if not final:
                        window.sent(sum(len(output.data) for output in response.outputs))
                call.respond(response, final)
                if call.ended:
                    return
                await window.wait()
        finally:
            await responses.aclose()

    def call_finished(self, call: Call) -> None:
        """The other server counts the call."""
        self._release_call(call)

    @property
    def ready(self) -> bool:
        """True: a request finds out."""
        return True

    @property
    def defines_is_ready(self) -> bool:
        """Whether it must be asked, as its last answer was not yes or may change at any time."""
        return self.described.defines_is_ready or bool(self.described.reason)

    async def why_not_ready(self) -> str:
        """Asks the other server. Raises HostError."""
        return await self._why_not_ready(self.name, self.version)

    async def stop(self, grace: float, finalize: float) -> None:
        """Gives up the calls in progress."""
        self.abort(HostError(ErrorCode.UNAVAILABLE, "the server stops"))
        tasks = list(self._tasks.values())
        if not tasks:
            return
        _, deaf = await asyncio.wait(tasks, timeout=_GIVE_UP_SECONDS)
        for task in deaf:
            task.cancel()
        if deaf:
            _log.error(
                "%d requests to remote model '%s' did not end within %g s after they were given up",
                len(deaf), self.name, _GIVE_UP_SECONDS,
            )  # fmt: skip


class _PassedOnCall(CallHolder):
    """Has a call that another server runs. `made_for`: the calls of that server made for it."""

    __slots__ = ("_made_for", "_task")

    def __init__(self, task: asyncio.Task[None], made_for: Callable[[], Sequence[Call]]) -> None:
        self._task = task
        self._made_for = made_for

    def cancel_call(self, call: Call) -> bool:
        """Cancels the request at the other server."""
        if self._task is not asyncio.current_task():
            self._task.cancel()
        return False

    @property
    def blocking_calls(self) -> Sequence[Call]:
        """Those that the other server waits for, as far as they have arrived here."""
        return self._made_for()


_Started = TypeVar("_Started")
_Answer = TypeVar("_Answer")

_ANSWER_SECONDS = 15.0  # for statistics, the index and readiness


class RemoteModels:
    """Enters models of other servers into the registry when they are asked for.

    `timeout`: the most seconds to learn of one. `others`: loads models of this server on demand.
    Belongs to the event loop.
    """

    def __init__(self, provider: RemoteModelProvider, registry: Registry, timeout: float) -> None:
        self._provider = provider
        self._registry = registry
        self._timeout = timeout
        self.returning = ReturningCalls()
        """Which calls of other servers were made for calls to these models."""
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._models: set[RemoteModel] = set()
        self.others: OnDemand | None = None
        """Loads models of this server on demand; None if it does not."""

    def serves(self, name: str) -> bool:
        """Whether the model belongs to another server."""
        return self._provider.serves(name)

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """Learns of the model of a request, then calls `start`; returns its result.

        Raises HostError.
        """
        if self.serves(request.model_name):
            await self.learn(request.model_name)
        elif self.others is not None:
            return await self.others.start_when_loaded(request, start)
        return start()

    async def refresh(self, name: str) -> None:
        """As `learn`, by a question that is asked after this call, if the model is remote."""
        if self.serves(name):
            await self._learn_anew(name)

    async def refresh_known(self, name: str) -> None:
        """As `refresh`, if this server has learned of the model before."""
        if self._registry.is_remote(name):
            await self._learn_anew(name)

    async def _learn_anew(self, name: str) -> None:
        running = self._learning.get(name)
        if running is not None:
            # Its answer may be older than what the caller wants to know.
            await asyncio.wait([running])
        await self.learn(name)

    async def learn(self, name: str) -> bool:
        """Asks for the versions of a model; returns whether they have changed. Raises HostError.

        Callers that ask at the same time share one answer.
        """
        before = self._registry.versions(name)
        task = self._learning.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._learn(name))
            self._learning[name] = task
            task.add_done_callback(lambda _: self._learning.pop(name, None))
        await asyncio.wait([task])  # it has a deadline of its own
        if task.cancelled():
            raise unavailable("Server exiting")
        task.result()
        after = self._registry.versions(name)
        return {n: v.model for n, v in before.items()} != {n: v.model for n, v in after.items()}

    async def _learn(self, name: str) -> None:
        described = await _within(
            self._timeout,
            self._provider.describe(name),
            f"the server of model '{name}' did not describe it",
        )
        known = self._registry.versions(name)
        entry = ModelEntry(reason="" if described else "no version is loaded")
        for one in described:
            old = known[one.version].model if one.version in known else None
            if isinstance(old, RemoteModel) and _is_same(old.described, one):
                old.described = one
                model = old
            else:
                model = RemoteModel(one, self._provider, self._why_not_ready, self.returning)
            entry.versions[one.version] = ModelVersion(one.version, VersionState.READY, model=model)
            self._models.add(model)
        served = {number: version.model for number, version in entry.versions.items()}
        if served != {n: v.model for n, v in known.items()} or not self._registry.is_remote(name):
            # All frontend processes read the table of models again.
            self._registry.set_remote(name, entry)
        self._models = {
            model
            for model in self._models
            if model.name != name or model in served.values() or model.in_use
        }

    async def _why_not_ready(self, name: str, version: int) -> str:
        """Asks again. Raises HostError."""
        await self.learn(name)
        found = self._registry.versions(name).get(version)
        if found is None or not isinstance(found.model, RemoteModel):
            return "its server has unloaded it"
        return found.model.described.reason

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """The statistics of a remote model. Raises HostError."""
        what = f"model '{name}'" if name else "the remote models"
        return await _within(
            _ANSWER_SECONDS,
            self._provider.statistics(name, version),
            f"did not receive the statistics of {what}",
        )

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The index entries of all remote models. Raises HostError."""
        return await _within(
            _ANSWER_SECONDS,
            self._provider.index(ready),
            "did not receive the index entries of the remote models",
        )

    async def ready(self) -> bool:
        """Whether all remote models are ready that should be; False without an answer in time."""
        answered = self._provider.ready()
        try:
            return await _within(
                _ANSWER_SECONDS, answered, "did not receive the readiness of the remote models"
            )
        except _NoAnswerError as error:
            _log.warning("%s", error.message)
            return False

    async def drain(self, seconds: float) -> bool:
        """Refuses new calls and lets those in progress end; returns whether they did in time."""
        drains = [asyncio.ensure_future(model.drain()) for model in self._models]
        if not drains:
            return True
        _, left = await asyncio.wait(drains, timeout=max(0.0, seconds))
        for drain in left:
            drain.cancel()
        return not any(model.in_use for model in self._models)

    async def close(self) -> None:
        """Gives up what is in progress."""
        for task in self._learning.values():
            task.cancel()
        await asyncio.gather(*(model.stop(0.0, 0.0) for model in self._models))
        self._models.clear()


class _NoAnswerError(HostError):
    """The other server did not answer in time."""


async def _within(seconds: float, asked: Coroutine[Any, Any, _Answer], otherwise: str) -> _Answer:
    """The answer of the provider. Raises what the provider raises, and _NoAnswerError."""
    task = asyncio.ensure_future(asked)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise _NoAnswerError(ErrorCode.UNAVAILABLE, f"{otherwise} within {seconds:g} s")
    finally:
        task.cancel()  # its end is not awaited, as the provider may ignore this
    if task.cancelled():
        raise _NoAnswerError(ErrorCode.UNAVAILABLE, f"{otherwise}: the provider was cancelled")
    return task.result()


def _is_same(old: RemoteVersion, new: RemoteVersion) -> bool:
    return old.config == new.config and old.labels == new.labels

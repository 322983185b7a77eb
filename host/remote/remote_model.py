"""One version of a model of another server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from host.errors import ErrorCode, HostError, internal, unavailable, unexpected_failure
from host.inference.call import Call, CallHolder
from host.inference.metadata import ModelStatistics
from host.inference.request import InferRequest, copy_from_shared_memory
from host.instances.client_memory import write_outputs
from host.metrics.model_metrics import ModelMetrics
from host.metrics.settings import MetricsSettings
from host.metrics.statistics import InferenceCounters
from host.models.draining import DrainableModel
from host.models.registry import Extensions
from host.remote.provider import RemoteModelProvider, RemoteVersion
from host.remote.response_window import ResponseWindow
from host.remote.returning_calls import ReturningCalls

_log = logging.getLogger("pbhost")

_MAX_UNACKNOWLEDGED = 32  # responses of one request, unless the caller has another limit
_GIVE_UP_SECONDS = 5.0  # for the provider to close a request

MadeForCall = Callable[[], Sequence[Call]]
"""The calls of other servers that were made for a call of this one."""

WhyNotReady = Callable[[str, int], Awaitable[str]]
"""Asks the other server why a version is not ready; "" if it is."""


class RemoteModel(DrainableModel):
    """Passes requests on. The other server validates, schedules and counts them."""

    def __init__(
        self,
        described: RemoteVersion,
        provider: RemoteModelProvider,
        why_not_ready: WhyNotReady,
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

    def statistics(self) -> ModelStatistics:
        """Nothing: the other server has them."""
        return self.counters.snapshot()

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
    """Has a call that another server runs. `made_for`: see MadeForCall."""

    __slots__ = ("_made_for", "_task")

    def __init__(self, task: asyncio.Task[None], made_for: MadeForCall) -> None:
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

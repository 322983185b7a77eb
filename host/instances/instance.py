"""The host's handle on one stub, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial

import msgspec

from host.crashes.quarantine import is_caused_by_request
from host.crashes.record import CrashRecord, describe_requests, find_stacks, format_time
from host.crashes.tensors import CrashedRequest
from host.environments.environment import Environment
from host.errors import HostError, internal, unavailable, unexpected_failure
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.instances.activity import InstanceActivity
from host.instances.batch import Batch
from host.instances.batch_tracker import Action, BatchTracker
from host.instances.block_releases import ReleaseTimer, arena_full_error
from host.instances.bls_requests import BlsRequest, BlsRequests
from host.instances.channel import BLS, WORK
from host.instances.host_calls import HostCalls
from host.instances.link import Link, ReclaimedFrame
from host.instances.pending_reply import PendingReply
from host.instances.process import (
    NO_MORE_PROCESSES,
    Launcher,
    StubLaunch,
    StubProcess,
    describe_exit,
    name_signal,
    stub_lost,
)
from host.instances.readiness import ReadinessCheck
from host.instances.services import HostServices
from host.instances.stack_reading import StackReading
from host.instances.transfer import TensorTransfer
from host.logs.formats import Label
from stub.wire import messages as m
from stub.wire.arena import ArenaFull
from stub.wire.log_budget import LogBudget
from stub.wire.payload import WireRequest, WireResponse
from stub.wire.session import ProtocolError, Session, State
from stub.wire.spawn import NO_THREADS_STATUS, SpawnArguments

_log = logging.getLogger("pbhost")

_CONNECT_TIMEOUT = 60.0  # start of the interpreter and imports, on a fully loaded machine
_MAX_BLS_FRAME_BYTES = 1 << 14  # of tensors in BLS responses, then their frame is sent at once
_CLOSED_STATES = (State.ERROR, State.ENDED)
_FINALIZABLE_STATES = (State.IDLE, State.AUTO_COMPLETED, State.SERVING)
_LOG_BUDGET_FACTOR = 2  # more than the stub allows, as lines may arrive in bursts
_EXIT_TIMEOUT = 5.0  # from the last message of the stub to its exit
_LAST_LINES, _LINE_LENGTH = 200, 1000  # of the output, kept for the record of a crash
_PHASES = {
    State.CONNECTING: "start of the process",
    State.AUTO_COMPLETING: "import or auto_complete_config",
    State.INITIALIZING: "import or initialize",
    State.FINALIZING: "finalize",
}
"""What a stub does in a state, for the record of a crash."""


class Instance:
    """One stub process. Its name is that of the model instance that it will be.

    `label` stands before its lines in the log. `on_unexpected_exit` is called with the reason if
    the process ends without having been told to; before that, `on_lethal_request` with the only
    request that it ran, if that may be the reason, and the record of the crash.
    """

    def __init__(
        self,
        name: str,
        label: Label,
        services: HostServices,
        environment: Environment | None = None,
        attached: bool = False,
        launcher: Launcher | None = None,
    ) -> None:
        self.name = name
        self._environment = environment  # its Python, if it is not the host's
        self._launcher = launcher or (services.terminal if attached else services.launcher)
        self._attached = attached  # to the terminal, where it can be debugged
        self.load_seconds = None if attached else services.load_seconds  # for each step of a load
        self.label = label
        self.on_unexpected_exit: Callable[[str], None] = lambda reason: None
        self.on_lethal_request: Callable[[InferRequest, CrashRecord], None] = lambda *crash: None
        self.exit_reason = ""  # how the process ended
        self.killed_by_signal = False  # whether a signal ended it
        self._services = services
        file = services.arenas.create_arena()
        self._session = Session()
        self._log_budget = LogBudget(factor=_LOG_BUDGET_FACTOR)
        self._link = Link(services.channel, services.busy_poller, self._on_frame, self._on_fault)
        self.set_log_levels(services.log_levels)
        self._process: StubProcess | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._told_to_end = False
        self._reply = PendingReply()
        self._transfer = TensorTransfer(
            services.arenas,
            file,
            ReleaseTimer(self._send_block_releases),
            self._link.inline_limit,
            self._link.bls_inline_limit,
        )
        self.bls_requests = BlsRequests(services, self._send_bls_response)
        # BLS responses that have not been sent yet, and the bytes of their tensors.
        self._bls_frame: list[m.ToStub] = []
        self._bls_frame_bytes = 0
        self.readiness_check = ReadinessCheck(self._notify)
        self._stacks = StackReading(self._notify)
        self.batches = BatchTracker(self._transfer, self._notify, self._log_line, self.bls_requests)
        self._host_calls = HostCalls(services, self._notify)
        services.arenas.on_closed.append(self._on_arena_closed)

    # Start and stop

    async def start(self) -> None:
        """Starts the process and waits until it has connected. Raises HostError or OSError."""
        services, arena = self._services, self._transfer.arena
        try:
            endpoint = services.channel.open_endpoint()
            lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self._release_resources()
            raise
        spawn = SpawnArguments(
            endpoint=endpoint,
            token=self._link.token,
            process_title=self.name,
            lifeline_fd=lifeline_read,
            rings_fd=self._link.rings_fd,
            work_event_fd=self._link.work_event,
            host_event_fd=self._link.host_event,
            bls_event_fd=self._link.bls_event,
            arena=arena.number,
            arena_fd=arena.fd,
            arena_limit=arena.limit,
            host_arena_fd=services.arenas.host_fd,
            host_arena_limit=services.arenas.limit,
            report_imports=services.imported_files is not None,
        )
        self._reply.expect_reply()
        launching = asyncio.ensure_future(
            self._launcher.launch(
                StubLaunch(
                    spawn, lifeline_write, self._log_output, self._on_exit, self._environment
                )
            )
        )
        launching.add_done_callback(partial(self._on_launched, lifeline_read, lifeline_write))
        try:
            await asyncio.shield(launching)
        except asyncio.CancelledError:
            # The process starts all the same, and must be ended.
            launching.add_done_callback(lambda _: self.kill())
            raise
        await self._wait_for_reply(_CONNECT_TIMEOUT)

    def _on_launched(
        self, lifeline_read: int, lifeline_write: int, launching: asyncio.Future[StubProcess]
    ) -> None:
        os.close(lifeline_read)
        if launching.cancelled() or launching.exception() is not None:
            os.close(lifeline_write)
            self._release_resources()
        else:
            process = self._process = launching.result()
            if process.leads_process_group and process.running:
                self._services.process_reaper.watch_group(process.pid)

    async def auto_complete(self, source: m.ModelSource, config: str) -> str | None:
        """Imports the model; returns its completed configuration (JSON), None if it has none.

        Raises HostError with the model's own text.
        """
        self._reply.expect_reply()
        self._send_work([m.AutoComplete(source, config)])
        reply = await self._wait_for_reply(self.load_seconds)
        assert isinstance(reply, m.AutoCompleted)
        return reply.config

    async def initialize(self, message: m.Initialize) -> None:
        """Initializes the model. Raises HostError with the model's own text."""
        self._reply.expect_reply()
        self.batches.name = message.instance_name
        self.batches.version = message.source.version
        self.batches.decoupled = message.decoupled
        self.batches.max_outstanding_responses = message.max_outstanding_responses
        self._host_calls.initializing = message.args["model_name"]
        self._send_work([message])
        reply = await self._wait_for_reply(self.load_seconds)
        self._host_calls.initializing = ""
        assert isinstance(reply, m.Initialized)
        self.readiness_check.model_defines_is_ready = reply.defines_is_ready
        self.batches.runs_coroutines = reply.runs_coroutines

    async def stop(self, grace: float, finalize: float) -> None:
        """Finalizes the model and waits for the process to end.

        Running work gets `grace` seconds, then the model's `finalize` gets `finalize` seconds. A
        process that needs longer is killed, unless it may be stopped at a breakpoint.
        """
        if self._attached:
            grace = finalize = math.inf
        self.on_unexpected_exit = lambda reason: None
        process = self._process
        if process is None or not process.running:
            return
        await self.batches.wait_idle(grace)
        if not self.batches.running and self._session.state in _FINALIZABLE_STATES:
            await self._finalize(finalize)
        self.kill()
        await process.wait()

    async def _finalize(self, seconds: float) -> None:
        self._reply.expect_reply()
        send = self._send_service if self.batches.runs_coroutines else self._send_work
        send([m.Finalize()])
        try:
            reply = await self._wait_for_reply(seconds)
        except HostError as error:
            self._log_line(m.LogLine(2, "instance.py", 0, f"finalize: {error.message}"))
            return
        if isinstance(reply, m.Finalized) and reply.error is not None:
            self._log_line(m.LogLine(0, "instance.py", 0, reply.error))
        assert self._process is not None
        await self._process.wait(_EXIT_TIMEOUT)

    def kill(self) -> None:
        """Kills the process; its work fails."""
        self._told_to_end = True
        self._kill_process()

    def _kill_process(self) -> None:
        if self._process is not None:
            self._process.kill()

    @property
    def pid(self) -> int:
        """The id of the process, 0 before it has started."""
        return self._process.pid if self._process is not None else 0

    @property
    def serving(self) -> bool:
        """Whether it takes batches."""
        return self._session.state is State.SERVING

    # Batches

    def execute(self, batch: Batch) -> None:
        """Runs a batch. Calls whose tensors do not fit into memory fail; the others run.

        A batch that may be returned may also be reclaimed. If no call can be sent, the batch ends
        later; but of a prefetched one, the scheduler sees that its calls have failed.
        """
        if self.exit_reason:  # the scheduler has not heard of its end yet
            for call in batch.calls:
                call.fail(unavailable(f"{self.exit_reason} before it had begun with this request."))
            batch.calls = ()
        frame: list[m.ToStub] = []
        transfer = self._transfer
        requests: list[WireRequest] = []
        calls: list[Call] = []
        failed: list[tuple[Call, HostError]] = []
        batch_requests = len(batch.calls)
        for call in batch.calls:
            try:
                requests.append(transfer.encode_request(call.request, WORK, frame, batch_requests))
            except ArenaFull as full:
                failed.append((call, arena_full_error(full)))
            except Exception as error:
                _log.exception(
                    "a request cannot be sent to the model", extra={"instance": self.label}
                )
                failed.append((call, unexpected_failure(error)))
            else:
                calls.append(call)
        batch.calls = calls
        if calls:
            self._send_batch(batch, requests, frame)
        else:
            if frame:  # arenas that count as announced
                self._send_work(frame)
            if not self.batches.running:
                self.batches.add_batch(batch)
                asyncio.get_running_loop().call_soon(self.batches.finish_unsent, batch)
        for call, failure in failed:
            call.fail(failure)

    def _send_batch(self, batch: Batch, requests: list[WireRequest], frame: list[m.ToStub]) -> None:
        number = self.batches.add_batch(batch)
        block_releases = self._transfer.collect_releases()
        if block_releases is not None:
            frame.append(block_releases)
        if batch.on_returned is None:
            frame.append(m.Execute(number, requests))
            self._send_work(frame)
        else:
            reclaimed = number, tuple(frame)
            frame.append(m.Execute(number, requests, True))
            self._send_work(frame, reclaimed)

    def reclaim_prefetched(self, most: int) -> list[Call]:
        """Takes back at most so many batches that the stub has not taken; returns their calls."""
        calls: list[Call] = []
        for number, other_messages in self._link.reclaim_frames(most):
            calls += self.batches.withdraw_batch(number)
            if other_messages:
                self._send_work(other_messages)
        return calls

    # Messages from the stub

    def _on_frame(self, frame: bytes) -> None:
        """Decodes a whole frame, then acts on it.

        The instance gets its next batch before a single response is delivered. Several responses
        are delivered before that, as their callers may send calls for that batch. Messages before
        one that breaks the protocol take effect, so that no call is lost.
        """
        try:
            messages = m.decode_to_host(frame)
            serving = self._session.state is State.SERVING
            if serving and (action := self.batches.handle_single_response(messages)):
                try:
                    if len(messages) == 3 and isinstance(last := messages[2], m.BlockRelease):
                        self._transfer.release_blocks(last)
                finally:
                    self._run_action(action)
                return
            if serving and len(messages) == 1 and type(messages[0]) is m.BlockRelease:
                self._transfer.release_blocks(messages[0])
                return
            reports, releases, responses, settlements = (list[Action]() for _ in range(4))
            try:
                for message in messages:
                    self._session.advance(message)
                    if isinstance(message, m.Response):
                        responses.append(self.batches.handle_response(message))
                    elif isinstance(message, m.BatchDone):
                        report, release, settlement = self.batches.handle_batch_done(message)
                        reports.append(report)
                        releases.append(release)
                        settlements.append(settlement)
                    elif isinstance(message, m.BlsRequest):
                        responses.append(self._prepare_bls_request(message))
                    elif isinstance(message, m.InstanceReleased):
                        releases.append(self.batches.handle_released(message))
                    elif isinstance(message, m.BatchReturned):
                        settlements.append(self.batches.handle_returned(message))
                    else:
                        _HANDLERS[type(message)](self, message)
            finally:
                if len(responses) > 1:
                    releases, responses = responses, releases
                for action in (*reports, *releases, *responses, *settlements):
                    self._run_action(action)
        except (msgspec.DecodeError, ProtocolError, KeyError, ValueError, IndexError) as error:
            self._on_fault(error)
        except Exception as error:
            self._on_unexpected_failure(error)

    def _run_action(self, action: Action) -> None:
        """Runs an action; if it fails, the other actions of the frame still run.

        A call whose response cannot be passed on has ended with an error (`Call.respond`).
        """
        try:
            action()
        except Exception:  # a defect of ours
            _log.exception("unexpected failure", extra={"instance": self.label})

    def _on_unexpected_failure(self, error: Exception) -> None:
        """Ends the calls of the stub and the stub itself, as messages of its frame are lost."""
        _log.error(
            "unexpected failure while messages of the stub were handled; it is killed",
            exc_info=error,
            extra={"instance": self.label},
        )
        self._session.state = State.ERROR
        self._link.stop_reading()
        self.batches.fail_started(unexpected_failure(error))
        self._kill_process()

    def _on_fault(self, error: Exception) -> None:
        """Kills a stub that breaks the protocol (user code can reach into it).

        Its end is reported like any other.
        """
        self._session.state = State.ERROR
        self._link.stop_reading()
        self._log_output(f"the stub broke the protocol: {error!r}", True)
        self._kill_process()

    def _prepare_bls_request(self, message: m.BlsRequest) -> Action:
        request = self._transfer.decode_request(message.request)
        request.trace = self._services.models.create_child_trace(message.request.trace)
        bls_request = BlsRequest(
            message.number, request, message.batch, message.blocking, message.decoupled
        )
        return partial(self.bls_requests.start_request, bls_request)

    def _send_bls_response(
        self, number: int, response: InferResponse | None, final: bool, blocking: bool
    ) -> None:
        if self._session.state not in (State.SERVING, State.FINALIZING):
            return
        wire: WireResponse | None = None
        if blocking:  # the main thread waits for work, and this response is work
            frame: list[m.ToStub] = []
            if response is not None:
                wire = self._transfer.encode_response(response, WORK, frame)
            block_releases = self._transfer.collect_releases()
            if block_releases is not None:
                frame.append(block_releases)
            frame.append(m.BlsResponse(number, wire, final))
            self._send_work(frame)
            return
        frame = self._bls_frame
        if not frame:
            asyncio.get_running_loop().call_soon(self._send_bls_frame)
        if response is not None:
            wire = self._transfer.encode_response(response, BLS, frame)
            self._bls_frame_bytes += sum(len(output.data or b"") for output in wire.outputs)
        frame.append(m.BlsResponse(number, wire, final))
        if self._bls_frame_bytes >= _MAX_BLS_FRAME_BYTES:
            self._send_bls_frame()

    def _send_bls_frame(self) -> None:
        """Sends the BLS responses of one turn of the loop in one frame."""
        frame, self._bls_frame, self._bls_frame_bytes = self._bls_frame, [], 0
        if not frame or self._session.state not in (State.SERVING, State.FINALIZING):
            return
        block_releases = self._transfer.collect_releases()
        if block_releases is not None:
            frame.append(block_releases)
        for message in frame:
            self._session.advance(message)
        self._link.send_bls_responses(frame)

    def _notify(self, message: m.ToStub) -> None:
        self._send_service([message])

    def _on_log_line(self, line: m.LogLine) -> None:
        """Logs a line of the model, or drops it if the model bypasses the limit of its stub."""
        if self._log_budget.admit(len(line.text) + len(line.file)):
            self._log_line(line, self.batches.calls_of_batch(line.batch))
        self._report_dropped_log_lines()

    def _report_dropped_log_lines(self, at_once: bool = False) -> None:
        report = self._log_budget.report(at_once)
        if report:
            self._log_line(m.LogLine(1, "instance.py", 0, report))

    def _log_line(self, line: m.LogLine, calls: Sequence[Call] = ()) -> None:
        self._last_lines.append(line.text[:_LINE_LENGTH])
        self._services.log_model_line(self.label, line, calls)

    def _on_imported_files(self, message: m.ImportedFiles) -> None:
        if self._services.imported_files is not None:
            self._services.imported_files.report(self.label.model, message.files)

    async def describe_activity(self) -> InstanceActivity:
        """What the instance does now, with the Python stacks of its stub."""
        calls, state = self.batches.started_calls, self._session.state
        serving = "execute" if calls else "between requests"
        pid = self.pid
        requests = describe_requests(call.request for call in calls)
        stacks: Sequence[str] = ()
        problem = ""
        try:
            stacks = await self._stacks.read(pid)
        except HostError as error:
            problem = error.message
        return InstanceActivity(
            self.label.model,
            self.label.version,
            self.name,
            pid,
            _PHASES.get(state, serving),
            len(calls),
            requests,
            list(stacks),
            problem,
        )

    def set_log_levels(self, levels: int) -> None:
        """Tells the stub which levels of `pb_utils.Logger` are written; level n is bit n."""
        self._link.set_log_levels(levels)

    def read_announced(self) -> asyncio.Future[None] | None:
        """Handles what the stub has sent so far; all of it once the event is set."""
        return self._link.read_announced()

    # End

    def _log_output(self, line: str, error: bool) -> None:
        self._last_lines.append(line[:_LINE_LENGTH])
        self._services.log_stub_output(self.label, line, error)

    def _on_exit(self, code: int) -> None:
        self._link.read_announced()  # its last messages
        self._report_dropped_log_lines(at_once=True)
        if self._link.dropped_frames:
            text = f"dropped {self._link.dropped_frames} frames that the ring did not announce"
            self._log_line(m.LogLine(1, "instance.py", 0, text))
        state = self._session.state
        expected = state is State.ENDED
        connected = self._session.state is not State.CONNECTING
        self._session.state = State.ENDED
        self._release_resources()
        if self._process is not None and self._process.leads_process_group:
            self._services.process_reaper.kill_group(self._process.pid)
        why = self._services.memory_group.take_kill() if code == -signal.SIGKILL else ""
        reason = f"Stub process '{self.name}' is not healthy. It {describe_exit(code, why)}"
        self.exit_reason = reason
        self.killed_by_signal = code < 0
        if not expected and not self._told_to_end:
            # A failure must not keep callers from their errors.
            self._run_action(partial(self._record_crash, code, f"{reason}.", state, bool(why)))
        if code == NO_THREADS_STATUS and not connected:
            text = f"cannot start a stub process for '{self.label}': {NO_MORE_PROCESSES}"
            self._reply.stub_exited(stub_lost(text))
        else:
            error = stub_lost if self.killed_by_signal else internal
            self._reply.stub_exited(error(f"{reason}."))
        self.batches.stub_exited(reason)
        self.bls_requests.cancel_all()
        self.readiness_check.stub_exited()
        self._stacks.stub_exited()
        self._host_calls.stub_exited()
        self._services.instance_exited(self)
        if not expected:
            self.on_unexpected_exit(reason)
        self.batches.fail_prefetched(reason)

    def _record_crash(self, code: int, reason: str, state: State, out_of_memory: bool) -> None:
        calls = self.batches.started_calls
        requests = [call.request for call in calls]
        record = self._describe_crash(code, reason, state, requests)
        now, decoupled = time.monotonic_ns(), self.batches.decoupled
        self._services.crash_records.add(
            record,
            [
                CrashedRequest(call.request, decoupled, (now - call.received_ns) / 1e9)
                for call in calls
            ],
        )
        # Of several requests, nobody can tell which one it was.
        if len(requests) == 1 and is_caused_by_request(code, out_of_memory):
            self.on_lethal_request(requests[0], record)

    def _describe_crash(
        self, code: int, reason: str, state: State, requests: Sequence[InferRequest]
    ) -> CrashRecord:
        now = datetime.now(timezone.utc)
        pid = self.pid
        serving = "execute" if requests else "between requests"
        output = list(self._last_lines)
        return CrashRecord(
            id=f"{now:%Y%m%dT%H%M%S%f}-{pid}",
            time=format_time(now),
            model=self.label.model,
            version=self.label.version,
            instance=self.name,
            pid=pid,
            reason=reason,
            signal=name_signal(-code) if code < 0 else "",
            status=code if code >= 0 else None,
            phase=_PHASES.get(state, serving),
            request_count=len(requests),
            requests=describe_requests(requests),
            stacks=find_stacks(output),
            output=output,
        )

    def _release_resources(self) -> None:
        self._link.close()
        self._services.arenas.on_closed.remove(self._on_arena_closed)
        self._transfer.stub_exited()

    def _on_arena_closed(self, number: int) -> None:
        if self._transfer.forget_arena(number) and self.serving:
            self._send_service([m.CloseArena(number)])

    def _send_block_releases(self) -> None:
        block_releases = self._transfer.collect_releases()
        if block_releases is not None and self._process is not None and self._process.running:
            self._send_service([block_releases])

    def _send_work(
        self, messages: Sequence[m.ToStub], reclaimed: ReclaimedFrame | None = None
    ) -> None:
        if self._session.state in _CLOSED_STATES:
            return
        for message in messages:
            self._session.advance(message)
        self._link.send_work(messages, reclaimed)

    def _send_service(self, messages: Sequence[m.ToStub]) -> None:
        if self._session.state in _CLOSED_STATES:
            return
        for message in messages:
            self._session.advance(message)
        self._link.send_service(messages)

    async def _wait_for_reply(self, seconds: float | None = None) -> m.ToHost:
        """Waits for the stub's next reply. Raises HostError: its error, its death, or a timeout."""
        late = stub_lost(
            f"Stub process '{self.name}' is not healthy. It gave no sign for {seconds or 0:g} s"
            f" while {self._session.state.value}."
        )
        return await self._reply.wait_for_reply(seconds, late)


_HANDLERS: dict[type, Callable[..., None]] = {
    m.Hello: lambda self, message: self._reply.set_reply(message),
    m.AutoCompleted: lambda self, message: self._reply.set_reply(message),
    m.Initialized: lambda self, message: self._reply.set_reply(message),
    m.LoadFailed: lambda self, message: self._reply.set_reply(message),
    m.Finalized: lambda self, message: self._reply.set_reply(message),
    m.LogLine: lambda self, line: self._on_log_line(line),
    m.BlockRelease: lambda self, message: self._transfer.release_blocks(message),
    m.CancelBls: lambda self, message: self.bls_requests.cancel_request(message.number),
    m.LoadModel: lambda self, message: self._host_calls.load_model(message),
    m.UnloadModel: lambda self, message: self._host_calls.unload_model(message),
    m.IsModelReady: lambda self, message: self._host_calls.is_model_ready(message),
    m.NewMetricFamily: lambda self, message: self._host_calls.new_metric_family(message),
    m.NewMetric: lambda self, message: self._host_calls.new_metric(message),
    m.ChangeMetric: lambda self, message: self._host_calls.change_metric(message),
    m.ReadMetric: lambda self, message: self._host_calls.read_metric(message),
    m.DropMetrics: lambda self, message: self._host_calls.drop_metrics(message),
    m.ImportedFiles: lambda self, message: self._on_imported_files(message),
    m.Stacks: lambda self, message: self._stacks.handle_stacks(message),
    m.ReadinessResult: lambda self, message: self.readiness_check.handle_result(message),
}

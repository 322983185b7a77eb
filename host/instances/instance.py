"""The host's handle on one stub, from its start to its end, and the record of an unexpected end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from host.crashes.quarantine import is_caused_by_request
from host.crashes.records import (
    CrashedRequest,
    CrashRecord,
    CrashRecords,
    describe_requests,
    find_stacks,
    format_time,
)
from host.environments.environment import Environment
from host.errors import HostError, internal, unexpected_failure
from host.inference.request import InferRequest
from host.instances.activity import InstanceActivity, StackReading, describe_phase
from host.instances.model_calls import HostCalls
from host.instances.readiness import PendingReply, ReadinessCheck
from host.instances.services import HostServices
from host.instances.stub_log import StubLog
from host.instances.stub_process import (
    NO_MORE_PROCESSES,
    Launcher,
    StubLaunch,
    StubProcess,
    describe_exit,
    name_signal,
    stub_lost,
)
from host.instances.stub_session import StubSession
from host.logs.formats import Label
from stub.wire import messages as m
from stub.wire.session import State
from stub.wire.spawn import NO_THREADS_STATUS, SpawnArguments

_log = logging.getLogger("pbhost")


class CrashReporter:
    """Keeps a record of each crash.

    `on_lethal_request` is called with the request and the record if the stub ran one request, which
    may have ended it.
    """

    def __init__(self, records: CrashRecords, session: StubSession, log: StubLog) -> None:
        self.on_lethal_request: Callable[[InferRequest, CrashRecord], None] = lambda *crash: None
        self._records = records
        self._session = session
        self._log = log

    def record_crash(
        self, pid: int, code: int, reason: str, state: State, out_of_memory: bool
    ) -> None:
        """Records an end with a return code as in `subprocess`, in a state."""
        calls = self._session.started_calls
        requests = [call.request for call in calls]
        record = self._describe(pid, code, reason, state, requests)
        now, decoupled = time.monotonic_ns(), self._session.decoupled
        crashed = [
            CrashedRequest(call.request, decoupled, (now - call.received_ns) / 1e9)
            for call in calls
        ]
        self._run_step(partial(self._records.add, record, crashed))
        # Of several requests, the cause is unknown.
        if len(requests) == 1 and is_caused_by_request(code, out_of_memory):
            self._run_step(partial(self.on_lethal_request, requests[0], record))

    def _run_step(self, step: Callable[[], None]) -> None:
        """Runs a step; if it fails, the others still run."""
        try:
            step()
        except Exception:  # a defect of ours
            _log.exception("unexpected failure", extra={"instance": self._log.label})

    def _describe(
        self, pid: int, code: int, reason: str, state: State, requests: Sequence[InferRequest]
    ) -> CrashRecord:
        now = datetime.now(timezone.utc)
        label, output = self._log.label, self._log.last_lines
        return CrashRecord(
            id=f"{now:%Y%m%dT%H%M%S%f}-{pid}",
            time=format_time(now),
            model=label.model,
            version=label.version,
            instance=label.instance,
            pid=pid,
            reason=reason,
            signal=name_signal(-code) if code < 0 else "",
            status=code if code >= 0 else None,
            phase=describe_phase(state, bool(requests)),
            request_count=len(requests),
            requests=describe_requests(requests),
            stacks=find_stacks(output),
            output=output,
        )


_CONNECT_TIMEOUT = 60.0  # start of the interpreter and imports, on a fully loaded machine
_FINALIZABLE_STATES = (State.IDLE, State.AUTO_COMPLETED, State.SERVING)
_EXIT_TIMEOUT = 5.0  # from the last message of the stub to its exit
_MAX_WARNINGS = 100  # about the files of one model


class Instance:
    """One stub process.

    `label` names the model instance that it will be, or the model alone until that is known.
    `on_unexpected_exit` is called with the reason if the process ends without having been told to.
    """

    def __init__(
        self,
        label: Label,
        services: HostServices,
        environment: Environment | None = None,
        attached: bool = False,
        launcher: Launcher | None = None,
        warnings: set[str] | None = None,
    ) -> None:
        self._warnings = set() if warnings is None else warnings  # that were logged
        self._environment = environment  # its Python, if it is not the host's
        self._launcher = launcher or (services.terminal if attached else services.launcher)
        self._attached = attached  # to the terminal, where it can be debugged
        self.load_seconds = None if attached else services.load_seconds  # for each step of a load
        self.on_unexpected_exit: Callable[[str], None] = lambda reason: None
        self.exit_reason = ""  # how the process ended
        self.killed_by_signal = False  # whether a signal ended it
        self._model_defines_sequences_expired = False
        self._services = services
        self._process: StubProcess | None = None
        self._told_to_end = False
        self._log = StubLog(label, services)
        self._reply = PendingReply()
        self.readiness_check = ReadinessCheck(self._notify)
        self._stacks = StackReading(self._notify)
        self._host_calls = HostCalls(services, self._notify)
        self.session = StubSession(
            services, self._log, self._message_handlers(), self._on_fault, self._on_failure
        )
        self._link = self.session.link
        self.set_log_levels(services.log_levels)
        self.crash_reporter = CrashReporter(services.crash_records, self.session, self._log)
        self.session.start_reading()

    def _message_handlers(self) -> Mapping[type, Callable[[Any], None]]:
        calls = self._host_calls
        return {
            m.Hello: self._reply.set_reply,
            m.AutoCompleted: self._reply.set_reply,
            m.Initialized: self._reply.set_reply,
            m.LoadFailed: self._reply.set_reply,
            m.Finalized: self._reply.set_reply,
            m.LogLine: self._on_log_line,
            m.ModelWarning: self._on_model_warning,
            m.LoadModel: calls.load_model,
            m.UnloadModel: calls.unload_model,
            m.IsModelReady: calls.is_model_ready,
            m.NewMetricFamily: calls.new_metric_family,
            m.NewMetric: calls.new_metric,
            m.ChangeMetric: calls.change_metric,
            m.ReadMetric: calls.read_metric,
            m.DropMetrics: calls.drop_metrics,
            m.ImportedFiles: self._on_imported_files,
            m.Stacks: self._stacks.handle_stacks,
            m.ReadinessResult: self.readiness_check.handle_result,
        }

    @property
    def label(self) -> Label:
        """Stands before its lines in the log."""
        return self._log.label

    @label.setter
    def label(self, label: Label) -> None:
        self._log.label = label

    @property
    def name(self) -> str:
        """The name of the model instance, "" before it is known."""
        return self._log.label.instance

    @property
    def pid(self) -> int:
        """The id of the process, 0 before it has started."""
        return self._process.pid if self._process is not None else 0

    @property
    def serving(self) -> bool:
        """Whether it takes batches."""
        return self.session.protocol.state is State.SERVING

    # Start and stop

    async def start(self) -> None:
        """Starts the process and waits until it has connected. Raises HostError or OSError."""
        services, arena = self._services, self.session.transfer.arena
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
                    spawn, lifeline_write, self._log.log_output, self._on_exit, self._environment
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
        self.session.send_work([m.AutoComplete(source, config)])
        reply = await self._wait_for_reply(self.load_seconds)
        assert isinstance(reply, m.AutoCompleted)
        return reply.config

    async def initialize(self, message: m.Initialize) -> None:
        """Initializes the model. Raises HostError with the model's own text."""
        self._reply.expect_reply()
        self.session.name = message.instance_name
        self.session.version = message.source.version
        self.session.decoupled = message.decoupled
        self.session.max_outstanding_responses = message.max_outstanding_responses
        self._host_calls.initializing = message.args["model_name"]
        self.session.send_work([message])
        reply = await self._wait_for_reply(self.load_seconds)
        self._host_calls.initializing = ""
        assert isinstance(reply, m.Initialized)
        self.readiness_check.model_defines_is_ready = reply.defines_is_ready
        self.session.runs_coroutines = reply.runs_coroutines
        self._model_defines_sequences_expired = reply.defines_sequences_expired

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
        await self.session.wait_idle(grace)
        if not self.session.running and self.session.protocol.state in _FINALIZABLE_STATES:
            await self._finalize(finalize)
        self.kill()
        await process.wait()

    async def _finalize(self, seconds: float) -> None:
        self._reply.expect_reply()
        session = self.session
        send = session.send_service if session.runs_coroutines else session.send_work
        send([m.Finalize()])
        try:
            reply = await self._wait_for_reply(seconds)
        except HostError as error:
            self._log.log_text(2, f"finalize: {error.message}")
            return
        if isinstance(reply, m.Finalized) and reply.error is not None:
            self._log.log_text(0, reply.error)
        assert self._process is not None
        await self._process.wait(_EXIT_TIMEOUT)

    def kill(self) -> None:
        """Kills the process; its work fails."""
        self._told_to_end = True
        self._kill_process()

    def _kill_process(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _wait_for_reply(self, seconds: float | None = None) -> m.ToHost:
        """Waits for the stub's next reply. Raises HostError: its error, its death, or a timeout."""
        late = stub_lost(
            f"Stub process '{self.name}' is not healthy. It did not respond within"
            f" {seconds or 0:g} s while {self.session.protocol.state.value}."
        )
        return await self._reply.wait_for_reply(seconds, late)

    # While it runs

    async def describe_activity(self) -> InstanceActivity:
        """What the instance does now, with the Python stacks of its stub."""
        calls, state = self.session.started_calls, self.session.protocol.state
        pid, label = self.pid, self.label
        requests = describe_requests(call.request for call in calls)
        stacks: Sequence[str] = ()
        problem = ""
        try:
            stacks = await self._stacks.read(pid)
        except HostError as error:
            problem = error.message
        return InstanceActivity(
            label.model,
            label.version,
            label.instance,
            pid,
            describe_phase(state, bool(calls)),
            len(calls),
            requests,
            list(stacks),
            problem,
        )

    def report_expired_sequences(self, correlation_ids: Sequence[int | str]) -> None:
        """Tells the model, if it wants to know, that sequences have ended without an END."""
        if self._model_defines_sequences_expired and self.serving:
            self.session.send_work([m.SequencesExpired(list(correlation_ids))])

    def set_log_levels(self, levels: int) -> None:
        """Tells the stub which levels of `pb_utils.Logger` are written; level n is bit n."""
        self._link.set_log_levels(levels)

    def read_announced(self) -> None:
        """Handles what the stub has sent so far."""
        self._link.read_announced()

    def _on_log_line(self, line: m.LogLine) -> None:
        self._log.log_model_line(line, self.session.calls_of_batch(line.batch))

    def _on_model_warning(self, message: m.ModelWarning) -> None:
        if message.text not in self._warnings and len(self._warnings) < _MAX_WARNINGS:
            self._warnings.add(message.text)
            self._log.log_warning(message.text)

    def _on_imported_files(self, message: m.ImportedFiles) -> None:
        if self._services.imported_files is not None:
            self._services.imported_files.report(self.label.model, message.files)

    def _notify(self, message: m.ToStub) -> None:
        self.session.notify(message)

    # End

    def _on_failure(self, error: Exception) -> None:
        """Ends the calls of the stub and the stub itself, as messages of its frame are lost."""
        _log.error(
            "unexpected failure while messages of the stub were handled; it is killed",
            exc_info=error,
            extra={"instance": self.label},
        )
        self.session.mark_failed()
        self.session.fail_started(unexpected_failure(error))
        self._kill_process()

    def _on_fault(self, error: Exception) -> None:
        """Kills a stub that breaks the protocol (user code can reach into it).

        Its end is reported like any other.
        """
        self.session.mark_failed()
        self._log.log_output(f"the stub broke the protocol: {error!r}", True)
        self._kill_process()

    def _on_exit(self, code: int) -> None:
        try:
            self._link.read_announced()  # its last messages
        except Exception:  # a defect of ours must not keep callers from their errors
            _log.exception("unexpected failure", extra={"instance": self.label})
        self._log.report_dropped_lines(at_once=True)
        if self._link.dropped_frames:
            text = f"dropped {self._link.dropped_frames} frames that the ring did not announce"
            self._log.log_text(1, text)
        state, self.session.protocol.state = self.session.protocol.state, State.ENDED
        expected = state is State.ENDED
        self._release_resources()
        if self._process is not None and self._process.leads_process_group:
            self._services.process_reaper.kill_group(self._process.pid)
        why = self._services.memory_group.take_kill() if code == -signal.SIGKILL else ""
        reason = f"Stub process '{self.name}' is not healthy. It {describe_exit(code, why)}"
        self.exit_reason = reason
        self.killed_by_signal = code < 0
        self.session.refuse_batches(reason)
        if not expected and not self._told_to_end:
            try:
                self.crash_reporter.record_crash(self.pid, code, f"{reason}.", state, bool(why))
            except Exception:  # as above
                _log.exception("unexpected failure", extra={"instance": self.label})
        self._reply.stub_exited(self._exit_error(code, state))
        self.session.stub_exited(reason)
        self.readiness_check.stub_exited()
        self._stacks.stub_exited()
        self._host_calls.stub_exited()
        self._services.instance_exited(self)
        if not expected:
            self.on_unexpected_exit(reason)
        self.session.fail_prefetched(reason)

    def _exit_error(self, code: int, state: State) -> HostError:
        """The error for a request to the stub, which has ended in a state without a reply."""
        if code == NO_THREADS_STATUS and state is State.CONNECTING:
            return stub_lost(f"cannot start a stub process for '{self.label}': {NO_MORE_PROCESSES}")
        error = stub_lost if self.killed_by_signal else internal
        return error(f"{self.exit_reason}.")

    def _release_resources(self) -> None:
        self._link.close()
        self.session.transfer.process_exited()

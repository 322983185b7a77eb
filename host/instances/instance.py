"""The host's handle on one stub: the conversation from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from host.environments.environment import Environment
from host.errors import HostError, internal, unavailable
from host.inference.request import Call, InferResponse
from host.instances.batch import Batch
from host.instances.bls_requests import Question, Questions
from host.instances.channel import SERVICE, WORK
from host.instances.host_calls import Queries
from host.instances.link import Link
from host.instances.process import StubProcess, describe_exit, stub_lost
from host.instances.readiness import Readiness
from host.instances.reply import Reply
from host.instances.services import HostServices
from host.instances.transfer import ReturnsDue, Transfer, no_room
from host.instances.work import Action, Work
from host.logs.formats import Label
from stub.wire import messages as m
from stub.wire.arena import ArenaFull
from stub.wire.payload import WireRequest, WireResponse
from stub.wire.session import ProtocolError, Session, State
from stub.wire.spawn import Spawn

_log = logging.getLogger("pbhost")

_CONNECT_SECONDS = 60.0  # interpreter start and imports of ours, on a machine under full load
_OVER = (State.ERROR, State.ENDED)
_CAN_FINALIZE = (State.IDLE, State.DESCRIBED, State.SERVING)
_LAST_WORDS_SECONDS = 5.0  # from saying that it leaves to being gone


class Instance:
    """One stub process. Its name is that of the model instance it is to become.

    `label` stands before its lines in the log.
    `on_death` is called with the reason if the process ends without having been asked to.
    """

    def __init__(
        self,
        name: str,
        label: Label,
        services: HostServices,
        environment: Environment | None = None,
        attached: bool = False,
    ) -> None:
        self.name = name
        self._environment = environment  # what Python it runs on, if not on the host's
        self._attached = attached  # to the terminal, where somebody may be debugging it
        self.load_seconds = None if attached else services.load_seconds  # for each step of a load
        self.label = label
        self.on_death: Callable[[str], None] = lambda reason: None
        self.death = ""  # how the process ended
        self.killed = False  # that was by a signal
        self._services = services
        file = services.arenas.create()
        self._session = Session()
        self._link = Link(services.channel, services.attention, self._frame, self._broken)
        self._process: StubProcess | None = None
        self._reply = Reply()
        self._transfer = Transfer(
            services.arenas, file, ReturnsDue(self._flush_returns), self._link.most_inline
        )
        self.questions = Questions(services, self._answer_ask)
        self.readiness = Readiness(self._tell)
        self.work = Work(self._transfer, self._tell, self._log_line, self.questions)
        self._queries = Queries(services, self._tell)
        services.arenas.on_closed.append(self._arena_closed)

    # Life

    async def start(self) -> None:
        """Start the process and wait until it is connected. Raises HostError or OSError."""
        services, arena = self._services, self._transfer.arena
        try:
            lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self._dispose()
            raise
        spawn = Spawn(
            endpoint=services.channel.endpoint,
            token=self._link.token,
            title=self.name,
            lifeline_fd=lifeline_read,
            rings_fd=self._link.rings_fd,
            work_event_fd=self._link.work_event,
            host_event_fd=self._link.host_event,
            arena=arena.number,
            arena_fd=arena.fd,
            arena_limit=arena.limit,
            host_arena_fd=services.arenas.host_fd,
            host_arena_limit=services.arenas.limit,
        )
        self._reply.expect()
        launching = asyncio.ensure_future(
            (services.terminal if self._attached else services.launcher).launch(
                spawn, lifeline_write, self._printed, self._exited, self._environment
            )
        )
        launching.add_done_callback(partial(self._launched, lifeline_read, lifeline_write))
        try:
            await asyncio.shield(launching)
        except asyncio.CancelledError:
            # It starts all the same, and must not be forgotten.
            launching.add_done_callback(lambda _: self.kill())
            raise
        await self._answer(_CONNECT_SECONDS)

    def _launched(
        self, lifeline_read: int, lifeline_write: int, launching: asyncio.Future[StubProcess]
    ) -> None:
        os.close(lifeline_read)
        if launching.cancelled() or launching.exception() is not None:
            os.close(lifeline_write)
            self._dispose()
        else:
            process = self._process = launching.result()
            if process.leads and process.running:
                self._services.warden.watch(process.pid)

    async def describe(self, source: m.ModelSource, config: str) -> str | None:
        """Import the model; its completed configuration (JSON), None if it completes nothing.

        Raises HostError with the model's own text.
        """
        self._reply.expect()
        self._send_work([m.Describe(source, config)])
        reply = await self._answer(self.load_seconds)
        assert isinstance(reply, m.Described)
        return reply.config

    async def initialize(self, become: m.Initialize) -> None:
        """Make it an instance of the model. Raises HostError with the model's own text."""
        self._reply.expect()
        self.work.name = become.instance_name
        self.work.version = become.source.version
        self.work.decoupled = become.decoupled
        self.work.window = become.window
        self._queries.initializing = become.args["model_name"]
        self._send_work([become])
        reply = await self._answer(self.load_seconds)
        self._queries.initializing = ""
        assert isinstance(reply, m.Initialized)
        self.readiness.defined = reply.checks

    async def stop(self, grace: float, finalize: float) -> None:
        """Have the model finalized and wait for the process to end.

        What it still works on gets `grace` seconds to end, then the model's `finalize` gets
        `finalize` seconds; a process that needs longer is killed, unless it may be stopped at a
        breakpoint.
        """
        if self._attached:
            grace = finalize = math.inf
        self.on_death = lambda reason: None
        process = self._process
        if process is None or not process.running:
            return
        await self.work.wait_idle(grace)
        if not self.work.running and self._session.state in _CAN_FINALIZE:
            await self._finalize(finalize)
        self.kill()
        await process.wait()

    async def _finalize(self, seconds: float) -> None:
        self._reply.expect()
        self._send_work([m.Finalize()])
        try:
            reply = await self._answer(seconds)
        except HostError as error:
            self._log_line(m.LogLine(2, "instance.py", 0, f"finalize: {error.message}"))
            return
        if isinstance(reply, m.Finalized) and reply.error is not None:
            self._log_line(m.LogLine(0, "instance.py", 0, reply.error))
        assert self._process is not None
        await self._process.wait(_LAST_WORDS_SECONDS)

    def kill(self) -> None:
        """End the process now; what it was doing fails."""
        if self._process is not None:
            self._process.kill()

    @property
    def serving(self) -> bool:
        """Whether it takes batches."""
        return self._session.state is State.SERVING

    # Work

    def execute(self, batch: Batch) -> None:
        """Run a batch. Calls whose tensors find no room fail, and the others go ahead."""
        if self.death:  # whoever has the batch could not be told yet
            for call in batch.calls:
                call.fail(unavailable(f"{self.death} before it had begun with this request."))
            batch.calls = ()
        frame: list[m.ToStub] = []
        transfer = self._transfer
        requests: list[WireRequest] = []
        calls: list[Call] = []
        crowd = len(batch.calls)
        for call in batch.calls:
            try:
                requests.append(transfer.send_request(call.request, WORK, frame, crowd))
            except ArenaFull as full:
                call.fail(no_room(full))
            else:
                calls.append(call)
        batch.calls = calls
        if not calls:
            asyncio.get_running_loop().call_soon(self.work.unsent, batch)
            return
        number = self.work.add(batch)
        returns = transfer.due()
        if returns is not None:
            frame.append(returns)
        frame.append(m.Execute(number, requests))
        self._send_work(frame)

    # Messages from the stub

    def _frame(self, frame: bytes) -> None:
        """Understand all of a frame first, then act on it.

        The lane gets its next batch before anyone looks at the answer; at several of them they look
        first, as those who asked may be in that batch then.
        """
        try:
            messages = m.decode_to_host(frame)
            if self._session.state is State.SERVING and (act := self.work.conclude(messages)):
                self._act(act)
                return
            reports, free, answers, over = (list[Action]() for _ in range(4))
            for message in messages:
                self._session.step(message)
                if isinstance(message, m.Respond):
                    answers.append(self.work.respond(message))
                elif isinstance(message, m.BatchDone):
                    report, finish, settle = self.work.done(message)
                    reports.append(report)
                    free.append(finish)
                    over.append(settle)
                elif isinstance(message, m.Ask):
                    answers.append(self._understand_ask(message))
                elif isinstance(message, m.Released):
                    free.append(self.work.release(message))
                else:
                    _HANDLERS[type(message)](self, message)
        except (msgspec.DecodeError, ProtocolError, KeyError, ValueError, IndexError) as error:
            self._broken(error)
            return
        if len(answers) > 1:
            free, answers = answers, free
        for action in (*reports, *free, *answers, *over):
            self._act(action)

    def _act(self, action: Action) -> None:
        try:
            action()
        except Exception:  # what else the stub has said must not be lost with it
            _log.exception("unexpected failure", extra={"instance": self.label})

    def _broken(self, error: Exception) -> None:
        """A stub that does not keep to the protocol (user code can reach into it) is of no use.

        Its death is reported like any other.
        """
        self._session.state = State.ERROR
        self._link.deafen()
        self._services.printed(self.label, f"the stub broke the protocol: {error!r}", True)
        self.kill()

    def _understand_ask(self, message: m.Ask) -> Action:
        request = self._transfer.receive_request(message.request)
        request.trace = self._services.models.child_trace(message.request.trace)
        question = Question(
            message.number, request, message.batch, message.blocking, message.decoupled
        )
        return partial(self.questions.start, question)

    def _answer_ask(
        self, number: int, response: InferResponse | None, final: bool, blocking: bool
    ) -> None:
        if self._session.state not in (State.SERVING, State.FINALIZING):
            return
        # The main thread waits for work, and an answer that holds up its batch is just that.
        socket = WORK if blocking else SERVICE
        frame: list[m.ToStub] = []
        wire: WireResponse | None = None
        if response is not None:
            wire = self._transfer.send_response(response, socket, frame)
        returns = self._transfer.due()
        if returns is not None:
            frame.append(returns)
        frame.append(m.Answer(number, wire, final))
        (self._send_work if blocking else self._send_service)(frame)

    def _tell(self, message: m.ToStub) -> None:
        self._send_service([message])

    def _log_line(self, line: m.LogLine, calls: Sequence[Call] = ()) -> None:
        self._services.model_log(self.label, line, calls)

    def drain(self) -> asyncio.Event:
        """Act on what the stub has said up to now: on all of it once the event is set."""
        self._link.drain()
        return self._link.caught_up

    # Ends

    def _printed(self, line: str, error: bool) -> None:
        self._services.printed(self.label, line, error)

    def _exited(self, code: int) -> None:
        self._link.drain()  # its last words
        expected = self._session.state is State.ENDED
        self._session.state = State.ENDED
        self._dispose()
        if self._process is not None and self._process.leads:
            self._services.warden.end(self._process.pid)
        reason = f"Stub process '{self.name}' is not healthy. It {describe_exit(code)}"
        self.death = reason
        self.killed = code < 0
        self._reply.lost((stub_lost if self.killed else internal)(f"{reason}."))
        self.work.end(reason)
        self.questions.end()
        self.readiness.end()
        self._queries.end()
        self._services.gone(self)
        if not expected:
            self.on_death(reason)
        self.work.fail_unstarted(reason)

    def _dispose(self) -> None:
        self._link.close()
        self._services.arenas.on_closed.remove(self._arena_closed)
        self._transfer.end()

    def _arena_closed(self, number: int) -> None:
        if self._transfer.forget(number) and self.serving:
            self._send_service([m.CloseArena(number)])

    def _flush_returns(self) -> None:
        returns = self._transfer.due()
        if returns is not None and self._process is not None and self._process.running:
            self._send_service([returns])

    def _send_work(self, messages: Sequence[m.ToStub]) -> None:
        if self._session.state in _OVER:
            return
        for message in messages:
            self._session.step(message)
        self._link.send_work(messages)

    def _send_service(self, messages: Sequence[m.ToStub]) -> None:
        if self._session.state in _OVER:
            return
        for message in messages:
            self._session.step(message)
        self._link.send_service(messages)

    async def _answer(self, seconds: float | None = None) -> m.ToHost:
        """The stub's next reply. Raises HostError: its failure, its death, or that time is over."""
        late = stub_lost(
            f"Stub process '{self.name}' is not healthy. It gave no sign for {seconds or 0:g} s"
            f" while {self._session.state.value}."
        )
        return await self._reply.wait(seconds, late)


_HANDLERS: dict[type, Callable[..., None]] = {
    m.Hello: lambda self, message: self._reply.came(message),
    m.Described: lambda self, message: self._reply.came(message),
    m.Initialized: lambda self, message: self._reply.came(message),
    m.LoadFailed: lambda self, message: self._reply.came(message),
    m.Finalized: lambda self, message: self._reply.came(message),
    m.LogLine: lambda self, line: self._log_line(line, self.work.calls(line.batch)),
    m.Return: lambda self, message: self._transfer.returned(message),
    m.Withdraw: lambda self, message: self.questions.withdraw(message.number),
    m.LoadModel: lambda self, message: self._queries.load(message),
    m.UnloadModel: lambda self, message: self._queries.unload(message),
    m.IsModelReady: lambda self, message: self._queries.is_ready(message),
    m.NewMetricFamily: lambda self, message: self._queries.new_family(message),
    m.NewMetric: lambda self, message: self._queries.new_metric(message),
    m.ChangeMetric: lambda self, message: self._queries.change(message),
    m.ReadMetric: lambda self, message: self._queries.read(message),
    m.DropMetrics: lambda self, message: self._queries.drop(message),
    m.Checked: lambda self, message: self.readiness.checked(message),
}

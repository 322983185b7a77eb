"""The stub's main loop and its service thread."""

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from typing import Deque, List, Optional

import pb_utils
from pb_utils._copying import help_if, show_by
from stub import python_logging
from stub.channel import Channel
from stub.children import Children
from stub.coroutines import Coroutines
from stub.cpu_affinity import BindingFailure, bind
from stub.executor import Executor
from stub.memory import Memory
from stub.process import set_title
from stub.readiness import Readiness
from stub.replies import Replies
from stub.runtime import StubRuntime
from stub.user_model import ModelFailure, UserModel
from stub.wire import messages as m
from stub.wire.arena import Arena, Block
from stub.wire.spawn import Spawn

_TRIM_SECONDS = 2.0  # how long freed tensor memory stays warm


class Worker:
    """One stub process, from the first message to the last."""

    def __init__(self, spawn: Spawn) -> None:
        self._lifeline = spawn.lifeline_fd
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        own = Arena(spawn.arena, spawn.arena_fd, spawn.arena_limit)
        self._memory = Memory(own, self._wake)
        self._memory.add(spawn.arena, spawn.arena_fd, spawn.arena_limit)
        self._memory.add(0, spawn.host_arena_fd, spawn.host_arena_limit)
        self._channel = Channel(spawn)
        self._memory.ring_takes = self._channel.most_inline
        self._replies = Replies(self._channel, self._memory, self._wake)
        self._coroutines = Coroutines(self._replies.on_loop)
        self._runtime = StubRuntime(self._channel, self._memory, self._set_aside, self._wake)
        self._children = self._provide_for_forks()
        self._model: Optional[UserModel] = None
        self._executor: Optional[Executor] = None
        self._readiness: Optional[Readiness] = None
        self._leaving = False
        self._trimming = False  # the service thread will look for memory to give back
        self._later: Deque[m.ToStub] = deque()  # work that came while `execute` waited for another

    def run(self) -> None:
        """Serve until told to leave."""
        self._install()
        service = threading.Thread(target=self._serve_service, name="pbhost-service", daemon=True)
        service.start()
        try:
            while not self._leaving:
                for message in self._channel.receive_work():
                    self._handle_work(message)
                while self._later:
                    self._handle_work(self._later.popleft())
        finally:
            self._leaving = True
            self._wake()
            service.join()
            self._channel.close()

    # What a process of its own does, and a thread of somebody else's does not (stub.threads)

    def _provide_for_forks(self) -> Optional[Children]:
        return Children(self._runtime, self._memory)

    def _install(self) -> None:
        pb_utils._runtime.install(self._runtime)
        # With other requests waiting, the host and their clients need the other cores.
        help_if(self._channel.is_idle)
        show_by(self._memory.snapshots.show)
        self._memory.snapshots.provide_for_forks()
        python_logging.install()

    def _find_model(self, source: m.ModelSource, instance: str, model: str) -> UserModel:
        """The code of a model. Raises ModelFailure."""
        return UserModel(source, instance)

    def _settle(self, become: m.Initialize) -> None:
        """Show the name, and keep to the policy. Raises BindingFailure."""
        set_title(become.instance_name)
        if warning := bind(become.cores, become.node):
            self._channel.send([m.LogLine(1, "binding.py", 0, warning)])

    def _host_gone(self) -> None:
        os._exit(1)  # nobody is left to answer to

    def _service_failed(self) -> None:
        # Without this thread no answer would come, and nobody would notice the host's end.
        traceback.print_exc()
        os._exit(1)

    def _handle_work(self, message: m.ToStub) -> None:
        if isinstance(message, m.Execute):
            self._execute(message)
        elif isinstance(message, m.Describe):
            self._describe(message)
        elif isinstance(message, m.Initialize):
            self._initialize(message)
        elif isinstance(message, m.Finalize):
            self._finalize()
        else:
            self._handle_memory(message)

    def _set_aside(self, message: m.ToStub) -> None:
        """What comes while the main thread waits for an answer in the middle of a batch."""
        if isinstance(message, m.Execute):
            self._later.append(message)
        else:
            self._handle_memory(message)

    def _handle_memory(self, message: m.ToStub) -> None:
        if isinstance(message, m.Return):
            for arena, offset, count in message.grants:
                self._memory.lent.returned(arena, offset, count)
            if not self._trimming:  # what came with work has not woken that thread
                self._wake()
        elif isinstance(message, m.OpenArena):
            try:
                self._memory.open(message)
            except OSError:
                # Its owner died between sending and now. The reference that follows fails its
                # request; nothing else is lost.
                self._log_error(f"arena {message.arena} has gone before it could be opened")
        elif isinstance(message, m.CloseArena):
            self._memory.close(message.arena)

    def _log_error(self, text: str) -> None:
        self._channel.send([m.LogLine(2, "worker.py", 0, text)])

    # Work, on the main thread

    def _execute(self, message: m.Execute) -> None:
        assert self._executor is not None
        memory, runtime = self._memory, self._runtime
        memory.open_batch(len(message.requests))
        runtime.begin(message.batch)
        answers = self._executor.run(message)
        runtime.end()
        returns = memory.ended()
        if returns is not None:
            answers.append(returns)
        try:
            self._channel.send(answers)
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be put into a message
            self._channel.send(self._executor.give_up(answers, error))
        self._executor.sent()
        memory.snapshots.tidy()
        memory.close_batch()

    def _describe(self, message: m.Describe) -> None:
        try:
            name = str(json.loads(message.config)["name"])
            self._model = self._find_model(message.source, "", name)
            self._runtime.lies_in(self._model.version_directory)
            completed = self._model.complete(message.config)
        except ModelFailure as failure:
            self._log_failure("Failed to initialize Python stub for auto-complete", failure)
            self._leave(m.LoadFailed(str(failure)))
            return
        self._channel.send([m.Described(completed)])

    def _initialize(self, message: m.Initialize) -> None:
        name = message.instance_name
        try:
            self._settle(message)
            if self._model is None:
                model = message.args["model_name"]
                self._model = self._find_model(message.source, name, model)
            self._runtime.become(name, self._model.version_directory)
            self._replies.become(message)
            self._model.initialize(message.args)
        except BindingFailure as failure:
            self._leave(
                m.LoadFailed(f"instance '{name}' cannot keep to its host policy: {failure}")
            )
            return
        except ModelFailure as failure:
            self._log_failure("Failed to initialize Python stub", failure)
            self._leave(m.LoadFailed(str(failure)))
            return
        send = self._channel.send
        self._executor = Executor(
            self._model, message, self._memory, self._replies, self._coroutines, send
        )
        self._readiness = Readiness(self._model, name, self._coroutines, send)
        self._runtime.allow_asking(True)
        send([m.Initialized(self._readiness.defined)])

    def _finalize(self) -> None:
        self._coroutines.stop()
        self._runtime.allow_asking(False)
        self._runtime.queries.control_allowed = False
        error = self._model.finalize() if self._model is not None else None
        try:
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the model has closed it, or put something else in its place: it has its reasons
        self._leave(m.Finalized(error))

    def _leave(self, last: m.ToHost) -> None:
        self._channel.send([last])
        self._leaving = True

    def _log_failure(self, heading: str, failure: ModelFailure) -> None:
        self._channel.send([m.LogLine(0, "user_model.py", 0, f"{heading}: {failure}")])

    # Everything else, on the service thread

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    def _serve_service(self) -> None:
        try:
            self._watch()
        except BaseException:  # a defect: printed, and the end of this process
            self._service_failed()

    def _watch(self) -> None:
        trim_at: Optional[float] = None
        children = self._children
        descriptors = [self._lifeline, self._wake_read]
        if children is not None:
            descriptors.append(children.descriptor)
        while not self._leaving:
            now = time.monotonic()
            wait = None if trim_at is None else max(0, int((trim_at - now) * 1000))
            wakeup = self._channel.receive_service(descriptors, wait)
            if self._lifeline in wakeup.descriptors:
                self._host_gone()
                return
            if self._wake_read in wakeup.descriptors:
                os.read(self._wake_read, 4096)
                self._say_for_finalisers()
            if children is not None and children.descriptor in wakeup.descriptors:
                children.serve()
            for message in wakeup.messages:
                self._handle_service(message)
            returns = self._memory.ended()
            if returns is not None:
                self._channel.send([returns])
            now = time.monotonic()
            if trim_at is None:
                trim_at = now + _TRIM_SECONDS
                self._trimming = True
            elif now >= trim_at:
                self._trimming = False  # before: what is freed meanwhile must not be overlooked
                self._memory.snapshots.tidy()
                if self._memory.own.trim():
                    trim_at = now + _TRIM_SECONDS
                    self._trimming = True
                else:
                    trim_at = None

    def _say_for_finalisers(self) -> None:
        """Finalisers run in the middle of anything, so they leave it to this thread to speak."""
        placed: List[Block] = []  # lives until what refers to it is sent
        messages = [*self._replies.dropped(placed), *self._runtime.unsaid()]
        if messages:
            self._channel.send(messages)

    def _handle_service(self, message: m.ToStub) -> None:
        if isinstance(message, m.Answer):
            self._runtime.answer(message)
        elif isinstance(message, m.Taken):
            self._replies.taken(message.batch, message.index, message.count)
        elif isinstance(message, m.Cancelled):
            self._replies.cancel(message.batch, message.index)
        elif isinstance(message, m.Told):
            self._runtime.queries.told(message)
        elif isinstance(message, m.CheckReady):
            assert self._readiness is not None
            self._readiness.check(message.number)
        else:
            self._handle_memory(message)

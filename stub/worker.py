"""The main loop and the service thread of a stub."""

import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Optional

import pb_utils
from pb_utils._api_modules import report_to
from pb_utils._storage import set_copy_on_write_mapper, set_core_is_free
from stub.bls_exchange import BlsBursts, BlsReader
from stub.coroutine_batches import CoroutineBatches
from stub.coroutines import CoroutineRunner, ReadinessChecker
from stub.executor import Executor
from stub.forked_children import ForkedChildren
from stub.host_calls import INSTANCE_ENDED
from stub.imports import list_imported_files
from stub.memory import StubMemory
from stub.observability import install_log_handler
from stub.preload import find_prepared_model
from stub.process import BindingError, bind_process, describe_stacks, set_title
from stub.responders import ResponderRegistry
from stub.runtime import StubRuntime
from stub.stub_channel import Channel
from stub.user_model import ModelFailure, UserModel, describe_exception
from stub.wire import messages as m
from stub.wire.arena import Arena, Block
from stub.wire.spawn import SpawnArguments

if TYPE_CHECKING:
    from concurrent.futures import Future

_TRIM_SECONDS = 2.0  # how long freed tensor memory stays warm


class Worker:
    """One stub process, from the first message to the last."""

    def __init__(self, spawn: SpawnArguments) -> None:
        self._lifeline = spawn.lifeline_fd
        self._started = time.time_ns()
        self._reports_imports = spawn.report_imports
        if spawn.report_imports:
            # Python takes cached bytecode for current if its source changed within the same second
            # and kept its size.
            sys.dont_write_bytecode = True
        self._module_count = 0  # of all modules, when the imported files were last reported
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        own = Arena(spawn.arena, spawn.arena_fd, spawn.arena_limit)
        self._memory = StubMemory(own, self._wake_service_thread)
        self._memory.add_inherited_arena(spawn.arena, spawn.arena_fd, spawn.arena_limit)
        self._memory.add_inherited_arena(0, spawn.host_arena_fd, spawn.host_arena_limit)
        self._channel = Channel(spawn)
        self._memory.ring_free_bytes = self._channel.inline_limit
        self._registry = ResponderRegistry(self._channel, self._memory, self._wake_service_thread)
        self._bls_reader = BlsReader(
            self._channel.bls_event, self._read_bls_responses, self._wake_service_thread
        )
        self._bls_bursts = BlsBursts(self._channel, self._wake_service_thread)
        self._coroutines = CoroutineRunner(self._on_loop_started, self._bls_reader.detach_loop)
        self._coroutine_batches: Optional[CoroutineBatches] = None
        self._runtime = StubRuntime(
            self._channel,
            self._memory,
            self._bls_reader,
            self._bls_bursts,
            self._defer_work,
            self._wake_service_thread,
        )
        self._children = self._register_fork_handlers()
        self._model: Optional[UserModel] = None
        self._executor: Optional[Executor] = None
        self._readiness: Optional[ReadinessChecker] = None
        self._stopping = False
        self._service_ended = False
        self._trimming = False  # the service thread will look for memory to give back
        self._deferred_work: Deque[m.ToStub] = deque()  # work received while `execute` waited

    def run(self) -> None:
        """Handles messages until the host stops this stub."""
        self._install_runtime()
        service = threading.Thread(target=self._serve_service, name="pbhost-service", daemon=True)
        service.start()
        try:
            while not self._stopping:
                for message in self._receive_work():
                    self._handle_work(message)
                while self._deferred_work:
                    self._handle_work(self._deferred_work[0])  # it is queued until it has ended
                    self._deferred_work.popleft()
        finally:
            self._stopping = True
            self._wake_service_thread()
            service.join()
            self._service_ended = True
            # The model's threads may wait for replies, which arrive on the service thread.
            self._runtime.fail_pending_calls(INSTANCE_ENDED)
            self._channel.close()

    def is_idle(self) -> bool:
        """Tells whether the main thread waited for its current work, and no more is queued."""
        return not self._deferred_work and self._channel.is_idle()

    # Overridden by stub.thread_worker, where the stub is a thread of another process

    def _register_fork_handlers(self) -> Optional[ForkedChildren]:
        return ForkedChildren(self._runtime, self._memory)

    def _install_runtime(self) -> None:
        pb_utils._runtime.install(self._runtime)
        # While other requests wait, the host and the clients need the other cores.
        set_core_is_free(self.is_idle)
        set_copy_on_write_mapper(self._memory.views.map_array)
        self._memory.views.register_fork_handlers()
        install_log_handler()
        report_to(self._warn)

    def _load_model(self, source: m.ModelSource, instance: str, model: str) -> UserModel:
        """Imports the code of a model. Raises ModelFailure."""
        return find_prepared_model(source) or UserModel(source, instance)

    def _set_up_instance(self, message: m.Initialize) -> None:
        """Sets the process title, and binds the process to its CPUs and NUMA node.

        Raises BindingError.
        """
        set_title(message.instance_name)
        if warning := bind_process(message.cpus, message.numa_node):
            self._channel.send([m.LogLine(1, "process.py", 0, warning)])

    def _on_host_gone(self) -> None:
        os._exit(1)  # the host is gone

    def _on_service_failure(self) -> None:
        # Without this thread no reply arrives, and the end of the host goes unnoticed.
        traceback.print_exc()
        os._exit(1)

    def _handle_work(self, message: m.ToStub) -> None:
        if isinstance(message, m.Execute):
            self._execute(message)
        elif isinstance(message, m.SequencesExpired):
            self._report_expired_sequences(message)
        elif isinstance(message, m.AutoComplete):
            self._auto_complete(message)
        elif isinstance(message, m.Initialize):
            self._initialize(message)
        elif isinstance(message, m.Finalize):
            self._finalize()
        else:
            self._handle_memory_message(message)

    def _defer_work(self, message: m.ToStub) -> None:
        """Handles messages that arrive while `execute` waits for a BLS response."""
        if isinstance(message, m.Execute):
            if message.reclaimable:
                self._channel.send([m.BatchReturned(message.batch)])
            else:
                self._deferred_work.append(message)
        elif isinstance(message, m.SequencesExpired):
            self._deferred_work.append(message)
        else:
            self._handle_memory_message(message)

    def _handle_work_on_loop(self, message: m.ToStub) -> None:
        """Handles work other than batches on the thread of the event loop."""
        if isinstance(message, m.SequencesExpired):
            self._report_expired_sequences(message)
        else:
            self._handle_memory_message(message)

    def _handle_memory_message(self, message: m.ToStub) -> None:
        if isinstance(message, m.BlockRelease):
            self._memory.exported.release_blocks(message)
            if not self._trimming:  # a release with work does not wake that thread
                self._wake_service_thread()
        elif isinstance(message, m.OpenArena):
            try:
                self._memory.open_arena(message)
            except (OSError, ValueError) as error:
                # Only requests and responses that refer to the arena fail.
                text = f"shared memory {message.arena} cannot be opened: {error}"
                self._channel.send([m.LogLine(2, "worker.py", 0, text)])
        elif isinstance(message, m.CloseArena):
            self._memory.close_arena(message.arena)

    # Work, on the main thread

    def _receive_work(self) -> List[m.ToStub]:
        batches = self._coroutine_batches
        return self._channel.receive_work() if batches is None else batches.receive_work()

    def _execute(self, message: m.Execute) -> None:
        assert self._executor is not None
        self._memory.begin_batch(len(message.requests))
        self._runtime.batch = message.batch
        messages = self._executor.run_batch(message)
        self._runtime.end_batch()
        self._end_batch(messages, self._executor.release_sent_blocks)

    def _end_coroutine_batch(self, messages: List[m.ToHost], release: Callable[[], None]) -> None:
        self._runtime.report_dropped_log_lines()
        self._end_batch(messages, release)

    def _end_batch(self, messages: List[m.ToHost], release: Callable[[], None]) -> None:
        """Sends the messages of a batch, calls `release`, and returns the memory of the batch."""
        assert self._executor is not None
        memory = self._memory
        returns = memory.take_releases()
        if returns is not None:
            messages.append(returns)
        try:
            if messages:  # a decoupled coroutine may have none left
                self._channel.send(messages)
        except (TypeError, ValueError, OverflowError) as error:  # a response cannot be encoded
            self._channel.send(self._executor.replace_unsendable(messages, error))
        release()
        if self._reports_imports:
            self._report_imports()
        memory.views.reclaim_dropped_views()
        returns = memory.end_batch()
        if returns is not None:
            self._channel.send([returns])

    def _auto_complete(self, message: m.AutoComplete) -> None:
        try:
            name = str(json.loads(message.config)["name"])
            self._model = self._load_model(message.source, "", name)
            self._runtime.version_directory = self._model.version_directory
            completed = self._model.auto_complete_config(message.config)
            self._report_imports()
        except ModelFailure as failure:
            self._report_imports(failure)
            self._log_failure("Failed to initialize Python stub for auto-complete", failure)
            self._send_last(m.LoadFailed(str(failure)))
            return
        self._channel.send([m.AutoCompleted(completed)])

    def _initialize(self, message: m.Initialize) -> None:
        name = message.instance_name
        try:
            self._set_up_instance(message)
            if self._model is None:
                model = message.args["model_name"]
                self._model = self._load_model(message.source, name, model)
            self._runtime.version_directory = self._model.version_directory
            self._runtime.set_instance_name(name)
            self._registry.configure(message, strict=self._reports_imports)
            self._model.initialize(message.args)
        except BindingError as failure:
            self._send_last(
                m.LoadFailed(f"instance '{name}' cannot apply its host policy: {failure}")
            )
            return
        except ModelFailure as failure:
            self._report_imports(failure)
            self._log_failure("Failed to initialize Python stub", failure)
            self._send_last(m.LoadFailed(str(failure)))
            return
        send = self._channel.send
        self._executor = Executor(
            self._model, message, self._memory, self._registry, self._coroutines, send
        )
        self._readiness = ReadinessChecker(self._model, name, self._coroutines, send)
        self._runtime.bls_allowed = True
        self._report_imports()
        runs_coroutines = self._executor.runs_coroutines
        if runs_coroutines:
            self._coroutine_batches = CoroutineBatches(
                self._executor,
                self._channel,
                self._memory,
                self._coroutines,
                self._handle_work_on_loop,
                self._end_coroutine_batch,
                self._on_service_failure,
            )
        defines_sequences_expired = self._model.defines("sequences_expired")
        send(
            [
                m.Initialized(
                    self._readiness.defines_is_ready, runs_coroutines, defines_sequences_expired
                )
            ]
        )
        if self._coroutine_batches is not None:
            self._coroutine_batches.start()

    def _report_expired_sequences(self, message: m.SequencesExpired) -> None:
        """Calls the model's `sequences_expired`, which harms no requests if it fails."""
        assert self._model is not None
        try:
            result = self._model.instance.sequences_expired(message.correlation_ids)
            future = self._coroutines.submit(result, 0) if inspect.iscoroutine(result) else None
        except BaseException as error:  # SystemExit, too
            self._log_sequences_expired(error)
            return
        if future is None:
            return
        if self._coroutine_batches is not None:  # this is the event loop, which must not wait
            future.add_done_callback(self._finish_sequences_expired)
        else:
            self._finish_sequences_expired(future)

    def _finish_sequences_expired(self, future: "Future[Any]") -> None:
        try:
            future.result()
        except BaseException as error:  # as above
            self._log_sequences_expired(error)

    def _log_sequences_expired(self, error: BaseException) -> None:
        text = f"sequences_expired failed: {describe_exception(error)}"
        self._channel.send([m.LogLine(2, "worker.py", 0, text)])

    def _finalize(self) -> None:
        self._coroutines.stop()
        self._runtime.bls_allowed = False
        self._runtime.control_allowed = False
        error = self._model.finalize() if self._model is not None else None
        try:
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the model has closed or replaced the stream
        self._runtime.report_dropped_log_lines(at_once=True)
        self._send_last(m.Finalized(error))

    def _send_last(self, last: m.ToHost) -> None:
        self._channel.send([last])
        self._stopping = True

    def _report_imports(self, error: Optional[BaseException] = None) -> None:
        """Tells the host which files the model has imported, if there are new ones."""
        if self._reports_imports and (error is not None or len(sys.modules) != self._module_count):
            self._module_count = len(sys.modules)
            files = list_imported_files(self._started, error)
            self._channel.send([m.ImportedFiles(files)])

    def _warn(self, text: str) -> None:
        try:
            self._channel.send([m.ModelWarning(text)])
        except RuntimeError:
            pass  # in a forked child of the model, whose imports must not fail because of it

    def _log_failure(self, heading: str, failure: ModelFailure) -> None:
        self._channel.send([m.LogLine(0, "user_model.py", 0, f"{heading}: {failure}")])

    # Everything else, on the service thread

    def _wake_service_thread(self) -> None:
        if self._service_ended:
            return  # a finaliser may call this after the pipe is closed
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    def _serve_service(self) -> None:
        try:
            self._run_service_loop()
        except BaseException:  # a bug: print it and end this process
            self._on_service_failure()

    def _run_service_loop(self) -> None:
        trim_at: Optional[float] = None
        children = self._children
        descriptors = [self._lifeline, self._wake_read]
        if children is not None:
            descriptors.append(children.descriptor)
        reads_bls = [*descriptors, self._channel.bls_event]
        while not self._stopping:
            now = time.monotonic()
            wait = self._bls_bursts.check()
            if self._memory.set_released_in_time(wait is not None):
                wait = 0
            if wait is None and trim_at is not None:
                wait = max(0, int((trim_at - now) * 1000))
            messages, ready = self._channel.receive_service(
                reads_bls if self._bls_reader.choose_thread() else descriptors, wait
            )
            if self._lifeline in ready:
                self._on_host_gone()
                return
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._send_deferred_messages()
            if children is not None and children.descriptor in ready:
                children.serve_request()
            # After a timeout, the thread that waits for the responses reads them more cheaply.
            if messages or self._channel.bls_event in ready:
                self._channel.read_bls_responses(self._handle_service)
            for message in messages:
                self._handle_service(message)
            returns = self._memory.take_releases()
            if returns is not None:
                self._channel.send([returns])
            now = time.monotonic()
            if trim_at is None:
                trim_at = now + _TRIM_SECONDS
                self._trimming = True
            elif now >= trim_at:
                self._trimming = False  # first, or the next release would not wake this thread
                self._memory.views.reclaim_dropped_views()
                if self._memory.own.trim():
                    trim_at = now + _TRIM_SECONDS
                    self._trimming = True
                else:
                    trim_at = None

    def _on_loop_started(self, thread: int) -> None:
        self._registry.loop_thread = thread
        self._bls_reader.set_loop_thread(thread)

    def _read_bls_responses(self) -> None:
        """Handles BLS responses on the thread of the event loop."""
        try:
            self._channel.read_bls_responses(self._handle_service)
        except BaseException:  # a bug: print it and end this process
            self._on_service_failure()

    def _send_deferred_messages(self) -> None:
        """Sends messages of finalisers, which must not send themselves: they may run anywhere."""
        placed: List[Block] = []  # alive until the messages are sent
        self._runtime.send_after_deferred(self._registry.take_responses_to_dropped_requests(placed))

    def _handle_service(self, message: m.ToStub) -> None:
        if isinstance(message, m.BlsResponse):
            self._runtime.receive_bls_response(message)
        elif isinstance(message, m.ResponseAck):
            self._registry.acknowledge_responses(message.batch, message.index, message.count)
        elif isinstance(message, m.CancelRequest):
            self._registry.cancel_request(message.batch, message.index)
        elif isinstance(message, m.HostReply):
            self._runtime.receive_reply(message)
        elif isinstance(message, m.CheckReady):
            assert self._readiness is not None
            self._readiness.start_check(message.number)
        elif isinstance(message, m.DescribeStacks):
            self._channel.send([m.Stacks(message.number, describe_stacks())])
        elif isinstance(message, m.Finalize):
            assert self._coroutine_batches is not None
            self._coroutine_batches.finalize(message)
        else:
            self._handle_memory_message(message)

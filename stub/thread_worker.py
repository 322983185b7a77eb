"""Runs model instances as threads of a user's process instead of stub processes.

The process takes the place of the fork server: the host sends it requests for stubs, with their
descriptors, and it starts a thread for each.
"""

import os
import socket
import threading
import time
import traceback
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional

import pb_utils
from stub.forked_children import ForkedChildren
from stub.host_calls import HOST_GONE
from stub.stub_channel import HostGone
from stub.user_model import ModelFailure, UserModel
from stub.wire import messages as m
from stub.wire.spawn import (
    RequestRefused,
    SpawnArguments,
    receive_request,
    send_ended,
    send_started,
)
from stub.worker import Worker

ModelProvider = Callable[[str], Any]
"""Returns an object with the methods of `TritonPythonModel` for a model name, or None."""

_JOIN_SECONDS = 2.0  # time for threads to end


class _ProvidedModel(UserModel):
    """A model object that a ModelProvider returns, instead of a class from a file."""

    def __init__(self, source: m.ModelSource, name: str, provide: ModelProvider) -> None:
        self.version_directory = os.path.join(source.directory, str(source.version))
        self.path = self.version_directory
        self.instance = None
        self._name = name
        self._provide = provide

    def auto_complete_config(self, config: str) -> Optional[str]:
        """Returns None: the configuration is complete already."""
        return None

    def initialize(self, args: Dict[str, str]) -> None:
        """Gets the object of the model. Raises ModelFailure."""
        self.instance = self._provide(self._name)
        if self.instance is None:
            raise ModelFailure(
                f"no function is bound as model '{self._name}', or all its instances are in use"
            )

    def finalize(self) -> Optional[str]:
        """Calls `finalize` of the object, if it has one, the first time only."""
        try:
            return super().finalize()
        finally:
            self.instance = None


class ThreadWorker(Worker):
    """A worker on two threads of a process that it must neither change nor end."""

    def __init__(self, spawn: SpawnArguments, provide: ModelProvider) -> None:
        super().__init__(spawn)
        self._provide = provide
        # A block that outlives this worker uses its wake pipe: the descriptors are closed after it.
        own = [*spawn.descriptors, self._wake_read, self._wake_write]
        own += self._bls_reader.descriptors
        weakref.finalize(self, _close_descriptors, own).atexit = False

    def run(self) -> None:
        """Handles messages until the host stops this instance, or ends."""
        self._runtime.main_thread = threading.get_ident()
        try:
            super().run()
        except HostGone:
            pass
        finally:
            self._coroutines.stop()
            if self._model is not None:
                # Also if no Finalize message has arrived.
                before, self._runtime.bls_allowed = self._runtime.bls_allowed, False
                self._model.finalize()
                self._runtime.bls_allowed = before
            # From Python 3.14 on, a Thread object that has ended still refers to its context.
            pb_utils._runtime._override.set(None)

    def _serve_service(self) -> None:
        self._install_runtime()
        super()._serve_service()

    def _register_fork_handlers(self) -> Optional[ForkedChildren]:
        return None

    def _install_runtime(self) -> None:
        # Both threads are new, so each has its own context variables.
        pb_utils._runtime._override.set(self._runtime)

    def _load_model(self, source: m.ModelSource, instance: str, model: str) -> UserModel:
        return _ProvidedModel(source, model, self._provide)

    def _set_up_instance(self, message: m.Initialize) -> None:
        threading.current_thread().name = f"pbhost {message.instance_name}"

    def _on_host_gone(self) -> None:
        self._channel.mark_host_gone()
        self._runtime.fail_pending_calls(HOST_GONE)

    def _on_service_failure(self) -> None:
        traceback.print_exc()
        self._on_host_gone()


class ThreadServer:
    """Serves the host's requests for stubs, on the other end of `sock`, by starting threads."""

    def __init__(self, sock: socket.socket, provide: ModelProvider) -> None:
        self._socket = sock
        self._provide = provide
        self._count = 0
        self._threads: List[threading.Thread] = []
        self._thread = threading.Thread(
            target=self._serve_requests, name="pbhost-instances", daemon=True
        )
        self._thread.start()

    def _serve_requests(self) -> None:
        try:
            while True:
                try:
                    request = receive_request(self._socket)
                except RequestRefused:
                    continue
                if request is None:
                    return
                spawn, stdout, stderr = request
                _close_descriptors((stdout, stderr))  # the output goes to that of the process
                self._start_instance(spawn)
        except OSError:
            return  # the host has ended

    def _start_instance(self, spawn: SpawnArguments) -> None:
        self._count += 1
        number = self._count
        thread = threading.Thread(target=self._run_instance, args=(spawn, number), daemon=True)
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_started(self._socket, spawn.token, number, pidfd)
        finally:
            os.close(pidfd)
        self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        thread.start()

    def _run_instance(self, spawn: SpawnArguments, number: int) -> None:
        code, process = 0, os.getpid()
        try:
            ThreadWorker(spawn, self._provide).run()
        except BaseException:  # an error of the function: print it and report it to the host
            traceback.print_exc()
            code = 1
        if os.getpid() != process:
            os._exit(code)  # a forked child of the function ends; the parent's instance continues
        try:
            send_ended(self._socket, number, code)
        except OSError:
            pass  # the host has ended

    def close(self) -> None:
        """Waits briefly for the threads after the host has ended; a busy function may continue."""
        end = time.monotonic() + _JOIN_SECONDS
        for thread in (self._thread, *self._threads):
            thread.join(max(0.0, end - time.monotonic()))
        self._socket.close()


def _close_descriptors(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

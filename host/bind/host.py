"""Serves functions of this process to clients as models, without a model repository."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host.bind.decorators import Function
from host.bind.function_model import Binding, FunctionModel
from host.bind.specs import (
    BadSpecError,
    DynamicBatcher,
    HostFailure,
    ModelConfig,
    ModelSpec,
    TensorSpec,
    with_default_names,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from host.bind.host_flags import HostFlags
from stub.thread_worker import ModelProvider, ThreadServer

_ENTRY = str(Path(__file__).resolve().parents[1] / "cli" / "bound.py")


class HostProcess:
    """A host in a child process. It serves nothing until `serve` is called.

    `take`: returns the instance to serve for a model's name. `on_exit`: called on another thread
    when the process exits. Raises HostFailure.
    """

    def __init__(
        self, flags: Sequence[str], take: ModelProvider, on_exit: Callable[[], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        launches, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = [asked.fileno(), theirs.fileno()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, _ENTRY, str(os.getpid()), *map(str, inherited), *flags],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            launches.close()
            raise HostFailure(f"cannot start a host: {error}") from error
        finally:
            theirs.close()
            asked.close()
        self._owner_pid = os.getpid()
        self._on_exit = on_exit
        self._control = ours
        self._request_count = 0
        self._replies: dict[int, Mapping[str, Any]] = {}  # by the number of the command
        self._reply_received = threading.Condition()
        self._request_lock = threading.Lock()
        self._exited = False
        self._instances = ThreadServer(launches, take)
        self._reader = threading.Thread(
            target=self._read_replies, name="pbhost-control", daemon=True
        )
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the host runs. False in a fork of this process."""
        return not self._exited and self._is_owner

    @property
    def _is_owner(self) -> bool:
        return os.getpid() == self._owner_pid

    def _read_replies(self) -> None:
        try:
            with self._control.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    reply = json.loads(line)
                    with self._reply_received:
                        self._replies[reply["to"]] = reply
                        self._reply_received.notify_all()
        except OSError:
            pass  # the host exited without closing the socket
        self._process.wait()
        with self._reply_received:
            self._exited = True
            self._reply_received.notify_all()
        self._on_exit()

    def bind(self, spec: ModelSpec) -> None:
        """Serves a model, at once or as soon as the host serves. Raises HostFailure."""
        self._request({"bind": spec.model_config(), "version": int(spec.version)})

    def serve(self) -> list[int]:
        """Loads the bound models and opens the ports; returns those of gRPC, HTTP and metrics.

        Raises HostFailure.
        """
        ports: list[int] = self._request({"serve": True})["serving"]
        return ports

    def _request(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a command and returns the reply. Raises HostFailure, also if the host exits."""
        if not self._is_owner:
            raise HostFailure(
                f"this process is a fork; only process {self._owner_pid} can use this host"
            )
        with self._request_lock:
            self._request_count += 1
            # Ctrl-C can leave a reply unread; the number keeps it apart from the next one.
            number = self._request_count
            self._send({**command, "number": number})
            with self._reply_received:
                self._reply_received.wait_for(lambda: number in self._replies or self._exited)
                if number not in self._replies:
                    raise HostFailure(f"the host {self._exit_text()}; see its log")
                reply = self._replies.pop(number)
        for refusal in ("failed", "refused"):
            if refusal in reply:
                raise HostFailure(str(reply[refusal]))
        return reply

    def _exit_text(self) -> str:
        code = self._process.returncode
        return f"exited with status {code}" if code >= 0 else f"was killed by signal {-code}"

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the host has exited; the wait for the reply reports it

    def stop(self) -> bool:
        """Stops the host; returns whether all requests finished within the exit timeout.

        In a fork of the process that started the host, does nothing.
        """
        if not self._is_owner:
            return True
        try:
            self._send({"stop": True})
            self._process.terminate()  # the host does not read commands while it loads models
            self._reader.join()
        finally:  # also after a second Ctrl-C
            self.kill()
        return self._process.returncode == 0

    def kill(self) -> None:
        """Kills the process and closes its sockets."""
        self._process.kill()
        self._reader.join()
        self._control.close()
        self._instances.close()


Flag = bool | int | float | str | Sequence[str]


_run_in_forks: list[Callable[[], None]] = []
"""Callbacks that run in a forked child at once.

A Python signal handler would run too late if the signal arrives just before the child blocks in a
system call.
"""


def _after_fork() -> None:
    for restore in _run_in_forks:
        restore()


os.register_at_fork(after_in_child=_after_fork)


class _StopSignal(KeyboardInterrupt):
    """A signal arrived while the host was starting."""


class Host:
    """Serves functions as models. Keyword arguments are flags of `pbhost serve`: `grpc_port=0`, ...

    `with Host(http_port=8000) as host: host.bind(...); host.serve()`

    The server is a child process, which exits together with this process. The functions run in this
    process, each in its own thread. Raises HostFailure.
    """

    def __init__(self, **flags: Unpack[HostFlags]) -> None:
        given: dict[str, Any] = {**flags}
        self._flags = [
            text for name, value in given.items() for text in _flag_arguments(name, value)
        ]
        self._bindings: dict[str, Binding] = {}
        self._state_lock = threading.Lock()  # held while a model is bound or the host starts
        self._process: HostProcess | None = None
        self._ports = [0, 0, 0]
        self._stopping = False
        self._serving = False
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(
            self, _close_descriptors, self._wake_read_fd, self._wake_write_fd
        ).atexit = False

    def bind(
        self,
        model_name: str,
        infer_func: Function | Sequence[Function],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        *,
        batching: bool | None = None,
        max_batch_size: int | None = None,
        batcher: DynamicBatcher | None = None,
        response_cache: bool | None = None,
        decoupled: bool | None = None,
    ) -> None:
        """Serves a function as a model; each function of a list is one instance.

        The function is called with a list of `Request`. For each request, it returns a dict of
        arrays, or a list of arrays in the order of `outputs`; see the decorators. `config` says how
        the model is served; the arguments after `strict` replace single fields of it. With
        `strict`, the dtypes and shapes that the function returns must be those of `outputs`. While
        the host runs, this method returns when the model is ready.

        Raises BadSpecError for invalid arguments, and HostFailure if the host refuses the model.
        """
        if config is not None and not isinstance(config, ModelConfig):
            raise BadSpecError(f"config must be a ModelConfig, got {type(config).__name__}")
        functions = list(infer_func) if isinstance(infer_func, Sequence) else [infer_func]
        _check_functions(model_name, functions)
        changes = {
            name: value
            for name, value in (
                ("batching", batching),
                ("max_batch_size", max_batch_size),
                ("batcher", batcher),
                ("response_cache", response_cache),
                ("decoupled", decoupled),
            )
            if value is not None
        }
        spec = ModelSpec(
            model_name,
            with_default_names(inputs, "INPUT"),
            with_default_names(outputs, "OUTPUT"),
            replace(config or ModelConfig(), **changes),  # type: ignore[arg-type]
            model_version,
            strict,
            len(functions),
        )
        with self._state_lock:
            self._bind(spec, functions)

    def _bind(self, spec: ModelSpec, functions: Sequence[Function]) -> None:
        if spec.name in self._bindings:
            raise BadSpecError(f"a model named '{spec.name}' is already bound")
        self._check_not_stopped()
        self._bindings[spec.name] = Binding(spec, functions)
        if self._process is not None:
            try:
                self._process.bind(spec)
            except HostFailure:
                del self._bindings[spec.name]
                raise

    def _check_not_stopped(self) -> None:
        if self._stopping:
            raise HostFailure("this host was stopped; create a new one")

    def run(self) -> Host:
        """Starts the host; returns when it accepts requests. Raises HostFailure."""
        with self._state_lock:
            self._run()
        return self

    def _run(self) -> None:
        if self._process is not None:
            raise HostFailure("this host is already started")
        self._check_not_stopped()
        child = self._process = HostProcess(self._flags, self._create_instance, self._wake)
        try:
            for binding in self._bindings.values():
                child.bind(binding.spec)
            self._ports = child.serve()
        except BaseException:  # also after Ctrl-C, because nothing else stops the child process
            self._process = None
            child.stop()
            raise

    def serve(self, monitoring_period_s: float | None = None) -> None:
        """Serves until Ctrl-C or SIGTERM, then finishes the running requests and stops.

        Only the main thread receives signals; on another thread, call `stop`. `monitoring_period_s`
        has no effect: the exit of the host is noticed at once. PyTriton has this argument. Raises
        HostFailure if the host exits by itself.
        """
        try:
            with self._signal_handlers():
                self._serve()
        except _StopSignal:
            pass  # stopped during the start
        self.stop()

    def _serve(self) -> None:
        if self._process is None:
            self.run()
        child = self._process
        assert child is not None
        self._serving = True
        waker = select.poll()  # unlike `select`, accepts descriptors above 1023
        waker.register(self._wake_read_fd, select.POLLIN)
        while child.running and not self._stopping:
            waker.poll()
            os.read(self._wake_read_fd, 4096)
        if not self._stopping:
            self.stop()
            raise HostFailure("the host exited by itself; see its log")

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Makes the first signal stop `serve`; restores the earlier handlers for a second one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.getsignal(number) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def received(number: int, frame: object) -> None:
            restore()
            if not self._serving:
                raise _StopSignal
            self._stopping = True
            self._wake()

        _run_in_forks.append(restore)
        for number in numbers:
            signal.signal(number, received)
        try:
            yield
        finally:
            restore()
            _run_in_forks.remove(restore)

    def is_alive(self) -> bool:
        """Returns whether the host was started and still runs."""
        return self._process is not None and self._process.running

    def stop(self) -> bool:
        """Refuses new requests, finishes the running ones and stops the host.

        Returns whether they finished within the exit timeout. A function that runs longer is not
        interrupted. A second call does nothing.
        """
        self._stopping = True
        self._wake()
        child, self._process = self._process, None
        return child is None or child.stop()

    @property
    def grpc_url(self) -> str:
        """The address for gRPC clients; "" if gRPC is not served."""
        return _url(self._ports[0])

    @property
    def http_url(self) -> str:
        """The address for HTTP clients, without a scheme; "" if HTTP is not served."""
        return _url(self._ports[1])

    @property
    def metrics_url(self) -> str:
        """The address of the metrics, without a scheme; "" if metrics are not served."""
        return _url(self._ports[2])

    def _create_instance(self, name: str) -> FunctionModel | None:
        binding = self._bindings.get(name)
        return None if binding is None else binding.create_instance()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write_fd, b"\0")
        except BlockingIOError:
            pass  # the pipe is full, so a wake-up is pending already

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _flag_arguments(name: str, value: Flag | None) -> Iterator[str]:
    """Converts a keyword argument to command-line flags."""
    if value is None:
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    for each in values:
        text = str(each).lower() if isinstance(each, bool) else str(each)
        yield f"--{name.replace('_', '-')}={text}"


def _close_descriptors(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _url(port: int) -> str:
    return f"127.0.0.1:{port}" if port else ""


def _check_functions(name: str, functions: Sequence[object]) -> None:
    if not functions:
        raise BadSpecError(f"model '{name}' needs at least one function")
    for function in functions:
        if not callable(function):
            raise BadSpecError(
                f"model '{name}' needs a function, or a list of functions; got"
                f" {type(function).__name__}"
            )

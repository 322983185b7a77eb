"""A host for functions of this process: bound by name, served to clients, without a repository."""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from host.bind.child import HostProcess
from host.bind.errors import BadSpecError, HostFailure
from host.bind.model import Binding, FunctionModel
from host.bind.specs import DynamicBatcher, ModelConfig, ModelSpec, TensorSpec, with_default_names

Flag = bool | int | float | str | Sequence[str]
Function = Callable[..., Any]


_run_in_forks: list[Callable[[], None]] = []
"""What a forked child does at once. Were it left to a handler of signals, a signal that comes just
before the child waits for something would be heard when that is over."""


def _after_fork() -> None:
    for restore in _run_in_forks:
        restore()


os.register_at_fork(after_in_child=_after_fork)


class _StopSignal(KeyboardInterrupt):
    """A signal has come while the host was being started."""


class Host:
    """Serves functions. Keyword arguments are flags of `pbhost serve`: `grpc_port=0`, ...

    `with Host(http_port=8000) as host: host.bind(...); host.serve()`

    The host is a process of its own, which ends with this one; the functions run here, in a thread
    for each. Raises HostFailure.
    """

    def __init__(self, **flags: Flag | None) -> None:
        self._flags = [
            text for name, value in flags.items() for text in _flag_arguments(name, value)
        ]
        self._bindings: dict[str, Binding] = {}
        self._state_lock = threading.Lock()  # held where something is bound, or the host started
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
        """Serve a function as a model; each of a list of functions is an instance.

        It is called with a list of `Request` and returns as many dicts of arrays, or lists of them
        in the order of `outputs`; see the decorators. `config` says how it is served, and the
        arguments after it change single fields of that. If `strict`, what the function returns is
        compared with `outputs`. While the host runs, this waits until the model serves.

        Raises BadSpecError for a description that cannot be used, HostFailure if the host refuses.
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
            raise BadSpecError(f"a model '{spec.name}' is bound already")
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
            raise HostFailure("this host has been stopped; make another one")

    def run(self) -> Host:
        """Start serving, and return once clients can ask. Raises HostFailure."""
        with self._state_lock:
            self._run()
        return self

    def _run(self) -> None:
        if self._process is not None:
            raise HostFailure("this host has been started already")
        self._check_not_stopped()
        child = self._process = HostProcess(self._flags, self._create_instance, self._wake)
        try:
            for binding in self._bindings.values():
                child.bind(binding.spec)
            self._ports = child.serve()
        except BaseException:  # Ctrl-C, too: nobody else would end this process
            self._process = None
            child.stop()
            raise

    def serve(self, monitoring_period_s: float | None = None) -> None:
        """Serve until Ctrl-C or SIGTERM, then let what runs finish.

        In another thread than the main one, signals do not come, and `stop` ends it.
        `monitoring_period_s` is for programs that give it; the end of the host is noticed at once.
        Raises HostFailure if the host ends by itself.
        """
        try:
            with self._signal_handlers():
                self._serve()
        except _StopSignal:
            pass  # before it served
        self.stop()

    def _serve(self) -> None:
        if self._process is None:
            self.run()
        child = self._process
        assert child is not None
        self._serving = True
        waker = select.poll()  # unlike `select`, it takes descriptors of any number
        waker.register(self._wake_read_fd, select.POLLIN)
        while child.running and not self._stopping:
            waker.poll()
            os.read(self._wake_read_fd, 4096)
        if not self._stopping:
            self.stop()
            raise HostFailure("the host has ended by itself; its log says why")

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Let signals end `serve`; a second one does what it did before."""
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
        """Whether it has been started, and runs."""
        return self._process is not None and self._process.running

    def stop(self) -> bool:
        """Refuse new requests, finish what runs, end; whether that was within the exit timeout.

        A function that goes on for longer is left to itself. Another call does nothing.
        """
        self._stopping = True
        self._wake()
        child, self._process = self._process, None
        return child is None or child.stop()

    @property
    def grpc_url(self) -> str:
        """For gRPC clients; "" if it is not served."""
        return _url(self._ports[0])

    @property
    def http_url(self) -> str:
        """For HTTP clients, without a scheme; "" if it is not served."""
        return _url(self._ports[1])

    @property
    def metrics_url(self) -> str:
        """Where metrics are, without a scheme; "" if they are not served."""
        return _url(self._ports[2])

    def _create_instance(self, name: str) -> FunctionModel | None:
        binding = self._bindings.get(name)
        return None if binding is None else binding.create_instance()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write_fd, b"\0")
        except BlockingIOError:
            pass  # it is awake

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _flag_arguments(name: str, value: Flag | None) -> Iterator[str]:
    """A keyword argument as flags of the command line."""
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

"""The interface between the API and the process that runs the model."""

from __future__ import annotations

import contextvars
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Protocol

from pb_utils._model_exception import TritonModelException

if TYPE_CHECKING:
    from pb_utils._request_fields import RequestFields
    from pb_utils._response import InferenceResponse


ResponseReceiver = Callable[["InferenceResponse | None", bool], None]
"""Receives a response and whether it is final; None is a final flag without a response.

Called on a thread of the runtime; it must not wait.
"""


class Runtime(Protocol):
    """The calls of the API to the process that runs the model.

    Any thread may call the methods; they wait without the GIL.
    """

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Write a message to the server's log; levels are 0 INFO to 3 VERBOSE."""
        ...

    def exec(self, request: RequestFields) -> InferenceResponse:
        """Send a request to another model and wait for its only response.

        Failures are responses.

        Raises:
            TritonModelException: requests are not allowed at this time.
        """
        ...

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Send a request to another model and do not wait; return what cancels it.

        Unless ``decoupled``, exactly one response comes. ``receive`` may be called before this
        returns. What is cancelled still comes to its end. Finalisers cancel as well, so that
        neither waits nor takes a lock.

        Raises:
            TritonModelException: requests are not allowed at this time.
        """
        ...

    def model_dir(self) -> str:
        """Return the folder of the model's version."""
        ...

    def free_memory(self) -> int:
        """Return the bytes of shared memory that tensors kept in this process leave free."""
        ...

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model and wait for it; ``files`` by their paths below the model's folder.

        Raises:
            TritonModelException: it cannot be loaded.
        """
        ...

    def unload_model(self, name: str, dependents: bool) -> None:
        """Begin to unload a model.

        Raises:
            TritonModelException: it cannot be unloaded.
        """
        ...

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model is ready; ``version`` is "" for any.

        Raises:
            TritonModelException: there is no such model.
        """
        ...

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """Register a metric family; return its number.

        Raises:
            TritonModelException: the server refuses it.
        """
        ...

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Create a metric in a family; return its number.

        Raises:
            TritonModelException: the server refuses it.
        """
        ...

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Change a metric's value; ``change`` is ``increment``, ``set`` or ``observe``.

        The next scrape shows it. Whether the change is possible has been checked before.
        """
        ...

    def read_metric(self, metric: int) -> float:
        """Return a metric's value.

        Raises:
            TritonModelException: the server refuses it.
        """
        ...

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Release metrics. Finalisers call this, so it neither waits nor takes a lock."""
        ...

    def error_message(self, text: str) -> str:
        """Return the server's text about a request of this model that it refused."""
        ...


class NoHostRuntime:
    """The runtime outside of a server: it can write logs, and refuses all other calls."""

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Write the message to stderr as the server does before its log is up."""
        micros = time.time_ns() // 1000
        stamp = time.strftime("%m%d %H:%M:%S", time.gmtime(micros // 1_000_000))
        sys.stderr.write(
            f"{'IWEI'[level]}{stamp}.{micros % 1_000_000:06d} {os.getpid()} "
            f"{filename}:{line}]  {message}\n"
        )
        sys.stderr.flush()

    def exec(self, request: RequestFields) -> InferenceResponse:
        """Always fail: no server runs this model."""
        raise self._unsupported("A request to another model (BLS)")

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Always fail: no server runs this model."""
        raise self._unsupported("A request to another model (BLS)")

    def model_dir(self) -> str:
        """Always fail: no server runs this model."""
        raise self._unsupported("get_model_dir()")

    def free_memory(self) -> int:
        """Always fail: no server runs this model."""
        raise self._unsupported("free_memory()")

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Always fail: no server runs this model."""
        raise self._unsupported("load_model()")

    def unload_model(self, name: str, dependents: bool) -> None:
        """Always fail: no server runs this model."""
        raise self._unsupported("unload_model()")

    def is_model_ready(self, name: str, version: str) -> bool:
        """Always fail: no server runs this model."""
        raise self._unsupported("is_model_ready()")

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """Always fail: no server runs this model."""
        raise self._unsupported("MetricFamily")

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Always fail: no server runs this model."""
        raise self._unsupported("Metric")

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Always fail: no server runs this model."""
        raise self._unsupported("Metric")

    def read_metric(self, metric: int) -> float:
        """Always fail: no server runs this model."""
        raise self._unsupported("Metric")

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Do nothing: the runtime that created the metrics is gone."""

    def error_message(self, text: str) -> str:
        """Return the text as it is."""
        return text

    def _unsupported(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"{what} needs a host that runs the model. To run a model in a test, without a server, "
            "use pb_utils.testing."
        )


_installed: Runtime = NoHostRuntime()
_thread_runtime: Runtime | None = (
    None  # to threads, which do not know the context that started them
)
_override: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar(
    "pb_utils_runtime", default=None
)


def install(runtime: Runtime) -> None:
    """Make ``runtime`` the runtime of the whole process."""
    global _installed
    _installed = runtime


def current() -> Runtime:
    """Return the runtime of this context, or that of the process."""
    return _override.get() or _thread_runtime or _installed


@contextmanager
def use(runtime: Runtime, lasting: bool = False) -> Iterator[None]:
    """Make ``runtime`` the current one within this block, in this context only.

    Threads that are started inside have contexts of their own. Without a host they see the
    runtime of the outermost block; if it is ``lasting``, also after the block, until
    ``stop_using``.
    """
    global _thread_runtime
    before = _thread_runtime
    if isinstance(_installed, NoHostRuntime) and _override.get() is None:
        _thread_runtime = runtime
    token = _override.set(runtime)
    try:
        yield
    finally:
        _override.reset(token)
        if not lasting:
            _thread_runtime = before


def stop_using(runtime: Runtime) -> None:
    """Stop using ``runtime`` for the threads of an earlier block."""
    global _thread_runtime
    if _thread_runtime is runtime:
        _thread_runtime = None


def get_model_dir() -> str:
    """Return the folder of the running model's version, ``<model>/<version>``.

    Raises:
        TritonModelException: no server runs this model.
    """
    return current().model_dir()

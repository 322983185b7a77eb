"""The runtime: the interface between the API and the process that runs the model."""

from __future__ import annotations

import contextvars
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Callable

from pb_utils._exceptions import TritonModelException

if TYPE_CHECKING:
    from pb_utils._request_fields import RequestFields
    from pb_utils._response import InferenceResponse


ResponseReceiver = Callable[["InferenceResponse | None", bool], None]
"""A function that receives a response, and whether it is final.

The response is None if the final flag came alone. A thread of the runtime calls the function, which
must not block.
"""


class Runtime:
    """The calls that the API makes to the process that runs the model.

    Any thread may call the methods. They release the GIL while they wait. This class is the runtime
    outside of a server: it writes log messages to stderr, and all other calls fail.

    Attributes:
        in_server: whether a server runs the model.
    """

    in_server = False

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Writes a message to the server's log, here in the format of a stub without a connection.

        Args:
            level: 0 INFO, 1 WARNING, 2 ERROR or 3 VERBOSE.
            filename: base name of the caller's file.
            line: line of the caller.
            message: the text.
        """
        micros = time.time_ns() // 1000
        stamp = time.strftime("%m%d %H:%M:%S", time.gmtime(micros // 1_000_000))
        sys.stderr.write(
            f"{'IWEI'[level]}{stamp}.{micros % 1_000_000:06d} {os.getpid()} "
            f"{filename}:{line}]  {message}\n"
        )
        sys.stderr.flush()

    def exec(self, request: RequestFields) -> InferenceResponse:
        """Sends a request to another model, and waits for its only response.

        A failure is a response with an error.

        Raises:
            TritonModelException: requests to other models are not allowed at this time.
        """
        raise self._unsupported("A request to another model (BLS)")

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Sends a request to another model without waiting.

        Args:
            request: the request.
            decoupled: whether to accept any number of responses; if not, there is exactly one.
            receive: gets the responses, perhaps before this method returns. It gets a final one
                also after a cancellation.

        Returns:
            A function that cancels the request. Finalisers call it, so it neither waits nor takes a
            lock.

        Raises:
            TritonModelException: requests to other models are not allowed at this time.
        """
        raise self._unsupported("A request to another model (BLS)")

    def waiting(self) -> AbstractContextManager[None]:
        """Returns a context manager for waiting for a response to ``send_request``."""
        return nullcontext()

    def model_dir(self) -> str:
        """Returns the folder of the model's version."""
        raise self._unsupported("get_model_dir()")

    def free_memory(self) -> int:
        """Returns the free shared memory of this instance in bytes."""
        raise self._unsupported("free_memory()")

    def load_model(self, name: str, config: str, files: Mapping[str, bytes], hold: bool) -> None:
        """Loads a model, and waits until it is loaded.

        Args:
            name: name of the model.
            config: configuration as JSON text; the stored one if empty.
            files: contents of files, by their paths below the model's folder.
            hold: whether this instance holds the model until it unloads it, or ends.

        Raises:
            TritonModelException: the model cannot be loaded.
        """
        raise self._unsupported("load_model()")

    def unload_model(self, name: str, dependents: bool) -> None:
        """Starts to unload a model, and with ``dependents`` the models of an ensemble's steps.

        Raises:
            TritonModelException: the model cannot be unloaded.
        """
        raise self._unsupported("unload_model()")

    def is_model_ready(self, name: str, version: str) -> bool:
        """Returns whether a model is ready. ``version`` is empty for any version.

        Raises:
            TritonModelException: the server has no such model or version.
        """
        raise self._unsupported("is_model_ready()")

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """Registers a metric family and returns its number.

        Raises:
            TritonModelException: the server rejects it.
        """
        raise self._unsupported("MetricFamily")

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Sequence[float] | None
    ) -> int:
        """Creates a metric in a family and returns its number.

        Raises:
            TritonModelException: the server rejects it.
        """
        raise self._unsupported("Metric")

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Changes the value of a metric; ``change`` is ``increment``, ``set`` or ``observe``.

        The API has checked before that the metric allows the change. The next scrape shows it.
        """
        raise self._unsupported("Metric")

    def read_metric(self, metric: int) -> float:
        """Returns the value of a metric.

        Raises:
            TritonModelException: the server rejects the call.
        """
        raise self._unsupported("Metric")

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Removes metrics and families. Finalisers call it, so it must not take a lock."""

    def error_message(self, text: str) -> str:
        """Returns the text that a server gives for a rejected call of this model."""
        return text

    def _unsupported(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"{what} needs a host that runs the model. To run a model in a test, without a server, "
            "use pbhost.testing."
        )


_installed = Runtime()
# For threads, which do not inherit the context of the thread that started them.
_thread_runtime: Runtime | None = None
_override: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar(
    "pb_utils_runtime", default=None
)


def install(runtime: Runtime) -> None:
    """Sets the runtime of the whole process."""
    global _installed
    _installed = runtime


def current() -> Runtime:
    """Returns the runtime of the current context; by default, the runtime of the process."""
    return _override.get() or _thread_runtime or _installed


@contextmanager
def use(runtime: Runtime, persistent: bool = False) -> Iterator[None]:
    """Makes ``runtime`` the current runtime within a ``with`` block, for the current context.

    Threads that are started in the block have other contexts. If no server runs the model, they use
    the runtime of the outermost block.

    Args:
        runtime: the runtime.
        persistent: whether these threads use it also after the block, until ``stop_using``.
    """
    global _thread_runtime
    before = _thread_runtime
    if not _installed.in_server and _override.get() is None:
        _thread_runtime = runtime
    token = _override.set(runtime)
    try:
        yield
    finally:
        _override.reset(token)
        if not persistent:
            _thread_runtime = before


def stop_using(runtime: Runtime) -> None:
    """Ends the use of a ``persistent`` runtime by threads of an earlier block."""
    global _thread_runtime
    if _thread_runtime is runtime:
        _thread_runtime = None


def get_model_dir() -> str:
    """Returns the folder of the model's version, ``<model folder>/<version>``.

    Raises:
        TritonModelException: no server runs the model.
    """
    return current().model_dir()


class SharedMemory:
    """The shared memory of this model instance. ``shared_memory`` is the only object."""

    __slots__ = ()

    def __init__(self) -> None:
        """Always raises: use the object ``shared_memory``.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.SharedMemory: No constructor defined!")

    def free_memory(self) -> int:
        """Returns the free shared memory of this instance in bytes.

        The value is the limit ``--arena-byte-size`` minus the tensors in shared memory that the
        model keeps: those that it created, and those that it received since the first call. Sent
        tensors do not count, even if a receiver still reads them, because their memory is released
        soon. Small tensors are sent inside messages and do not count
        (docs/reference/model-processes.md, "Options and shared memory").

        Raises:
            TritonModelException: no server runs the model.
        """
        return current().free_memory()


shared_memory = SharedMemory.__new__(SharedMemory)

"""The one seam between the API and whatever runs a model: a host's stub, or nobody."""

from __future__ import annotations

import contextvars
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pb_utils._model_exception import TritonModelException

if TYPE_CHECKING:
    from pb_utils._request import InferenceRequest
    from pb_utils._response import InferenceResponse


class Runtime(Protocol):
    """What the API asks of the process that runs the model. Every method may be called from any
    thread, and waits without holding the GIL.
    """

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Write a message to the server's log; levels are 0 INFO to 3 VERBOSE."""
        ...

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        """Send a request to another model and wait for its response; failures are responses.

        Raises:
            TritonModelException: requests are not allowed at this time.
        """
        ...

    def model_dir(self) -> str:
        """Return the folder of the model's version."""
        ...

    def is_cancelled(self, request: InferenceRequest) -> bool:
        """Return whether the client of an incoming request has cancelled it."""
        ...


class NoHost:
    """Stands in while a model is imported by an ordinary Python: it can log, and nothing else."""

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Write the message to stderr as the server does before its log is up."""
        micros = time.time_ns() // 1000
        stamp = time.strftime("%m%d %H:%M:%S", time.gmtime(micros // 1_000_000))
        sys.stderr.write(
            f"{'IWEI'[level]}{stamp}.{micros % 1_000_000:06d} {os.getpid()} "
            f"{filename}:{line}]  {message}\n"
        )
        sys.stderr.flush()

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        """Refuse."""
        raise _needs_host("A request to another model (BLS)")

    def model_dir(self) -> str:
        """Refuse."""
        raise _needs_host("get_model_dir()")

    def is_cancelled(self, request: InferenceRequest) -> bool:
        """Refuse."""
        raise _needs_host("is_cancelled()")


_installed: Runtime = NoHost()
_override: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar(
    "pb_utils_runtime", default=None
)


def install(runtime: Runtime) -> None:
    """Let ``runtime`` answer for the whole process from now on."""
    global _installed
    _installed = runtime


def current() -> Runtime:
    """Return the runtime that answers here: the one in use in this context, or the process's."""
    return _override.get() or _installed


@contextmanager
def use(runtime: Runtime) -> Iterator[None]:
    """Let ``runtime`` answer within this block, in this context only.

    Threads that are started inside have contexts of their own. Without a host they see the
    runtime of the outermost block.
    """
    global _installed
    before = _installed
    if isinstance(before, NoHost):
        _installed = runtime
    token = _override.set(runtime)
    try:
        yield
    finally:
        _override.reset(token)
        if isinstance(before, NoHost):
            _installed = before


def get_model_dir() -> str:
    """Return the folder of the running model's version, ``<model>/<version>``.

    Raises:
        TritonModelException: no host runs this model.
    """
    return current().model_dir()


def _needs_host(what: str) -> TritonModelException:
    return TritonModelException(
        f"{what} needs a host that runs the model. To run a model in a test, without a server, "
        "use pb_utils.testing."
    )

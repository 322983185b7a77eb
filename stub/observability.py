"""Sends Python's `logging` to the host's log; makes a batch's span the OpenTelemetry context."""

import json
import logging
from typing import Any

from pb_utils import _runtime

_ERROR, _WARNING, _INFO, _VERBOSE = 2, 1, 0, 3
"""Levels as in docs/reference/model-module.md, "Logger"."""


class HostHandler(logging.Handler):
    """Forwards records as `pb_utils.Logger` does, with their file name and line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one record; the host decides whether to write it."""
        try:
            text = self.format(record)
            _runtime.current().log(_level(record.levelno), record.filename, record.lineno, text)
        except Exception:  # like the standard handlers: logging must not raise
            self.handleError(record)


def _level(number: int) -> int:
    if number >= logging.ERROR:
        return _ERROR
    if number >= logging.WARNING:
        return _WARNING
    return _INFO if number >= logging.INFO else _VERBOSE


def install_log_handler() -> None:
    """Forwards records that have no other handler, from level INFO on.

    The handler replaces `logging.lastResort` and is not a handler of the root logger, so that a
    model can still configure `logging` itself, for example by `basicConfig`.
    """
    handler = HostHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.lastResort = handler
    logging.getLogger().setLevel(logging.INFO)


_UNAVAILABLE = object()
_modules: Any = None


def attach_context(context: str) -> Any:
    """Makes W3C headers (JSON) this thread's current context; returns the token for `detach`.

    Returns None if OpenTelemetry is not installed: the model cannot create spans then.
    """
    global _modules
    if _modules is None:
        try:
            from opentelemetry import context as contexts
            from opentelemetry.trace.propagation import tracecontext
        except ImportError:
            _modules = _UNAVAILABLE
        else:
            _modules = contexts, tracecontext.TraceContextTextMapPropagator()
    if _modules is _UNAVAILABLE:
        return None
    contexts, propagator = _modules
    return contexts.attach(propagator.extract(json.loads(context)))


def detach_context(token: Any) -> None:
    """Restores the context from before `attach_context`."""
    if token is not None:
        _modules[0].detach(token)

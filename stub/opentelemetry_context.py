"""The span that a batch is part of, as the current one of OpenTelemetry inside of `execute`."""

import json
from typing import Any

_UNAVAILABLE = object()
_modules: Any = None


def attach(context: str) -> Any:
    """Make W3C headers (JSON) the current context of this thread; what to `detach` by.

    Without OpenTelemetry in this Python, nothing happens: the model cannot make spans either.
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


def detach(token: Any) -> None:
    """Have the context be what it was before `attach`."""
    if token is not None:
        _modules[0].detach(token)

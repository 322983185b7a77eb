"""Makes the span of a batch the current OpenTelemetry context inside `execute`."""

import json
from typing import Any

_UNAVAILABLE = object()
_modules: Any = None


def attach(context: str) -> Any:
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


def detach(token: Any) -> None:
    """Restores the context from before `attach`."""
    if token is not None:
        _modules[0].detach(token)

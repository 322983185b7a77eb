"""Records trace events of HTTP requests (docs/reference/protocol.md, "Trace files")."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from host.frontends.http.exchange import HttpExchange
from host.inference.request import InferRequest, RequestTracer


def receive_started(tracing: RequestTracer | None) -> int:
    """Returns the start time of a request in nanoseconds; 0 if tracing is off."""
    return 0 if tracing is None else time.monotonic_ns()


@contextmanager
def trace_request(
    tracing: RequestTracer | None,
    exchange: HttpExchange,
    request: InferRequest,
    receive_started_ns: int,
) -> Iterator[None]:
    """Traces a request, whose body is complete, until its response is sent."""
    if tracing is None:
        yield
        return

    def header(name: str) -> str | None:
        value = exchange.header(name)
        return None if value is None else value.decode("latin-1")

    trace = request.trace = tracing.start_trace(request.model_name, header)
    if trace is None:
        yield
        return
    trace.record_event("HTTP_RECV_START", receive_started_ns)
    trace.record_event("HTTP_RECV_END")
    try:
        yield
    finally:
        trace.finish_response()


@contextmanager
def trace_response(request: InferRequest) -> Iterator[None]:
    """Records the start and the end of sending a response."""
    trace = request.trace
    if trace is not None:
        trace.record_event("HTTP_SEND_START")
    yield
    if trace is not None:
        trace.record_event("HTTP_SEND_END")

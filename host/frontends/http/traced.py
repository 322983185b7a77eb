"""A request at the HTTP door that may be traced (protocol spec 7.2)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from host.frontends.http.exchange import HttpExchange
from host.inference.request import InferRequest, RequestTracer


def receive_started(tracing: RequestTracer | None) -> int:
    """When the door has begun to read a request, in nanoseconds; 0 while nothing is traced."""
    return 0 if tracing is None else time.monotonic_ns()


@contextmanager
def trace_request(
    tracing: RequestTracer | None,
    exchange: HttpExchange,
    request: InferRequest,
    receive_started_ns: int,
) -> Iterator[None]:
    """Until the end of this, the door works on the request, whose body it has read."""
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
    """Until the end of this, the door sends the answer."""
    trace = request.trace
    if trace is not None:
        trace.record_event("HTTP_SEND_START")
    yield
    if trace is not None:
        trace.record_event("HTTP_SEND_END")

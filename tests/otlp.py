"""A collector of OpenTelemetry spans: OTLP over HTTP, decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.conftest import wait_until


@dataclass
class Span:
    """One span; ids in hexadecimal, "" for no parent."""

    name: str
    trace: str
    id: str
    parent: str
    state: str
    kind: int
    start: int
    end: int
    failure: str
    attributes: dict[str, Any]
    events: list[str]
    scope: str
    resource: dict[str, Any] = field(repr=False)


class Collector:
    """Spans as they arrived, at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self.spans: list[Span] = []
        self.types: set[str] = set()

    def receive(self, body: bytes) -> None:
        """Decodes a posted request."""
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self.spans += [
                    Span(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.trace_state,
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.message,
                        _values(span.attributes),
                        [event.name for event in span.events],
                        scope_spans.scope.name,
                        resource,
                    )
                    for span in scope_spans.spans
                ]

    def wait_for(self, condition: Callable[[Span], bool], count: int) -> list[Span]:
        """The spans that fulfil a condition, once there are `count` of them."""
        wait_until(lambda: len(list(filter(condition, self.spans))) >= count, f"{count} spans")
        return list(filter(condition, self.spans))

    def wait_for_trace(self, trace: str, count: int) -> dict[str, Span]:
        """The spans of one trace by name, once there are `count`."""
        found = self.wait_for(lambda span: span.trace == trace, count)
        assert len(found) == count
        return {span.name: span for span in found}

    def wait_for_request(self, request_id: str, count: int) -> dict[str, Span]:
        """The spans of the trace that a request has, by name, once there are `count`."""
        of_model = self.wait_for(lambda s: s.attributes.get("triton.request_id") == request_id, 1)
        return self.wait_for_trace(of_model[0].trace, count)


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector, until the end of this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.types.add(str(self.headers["content-type"]))
            collector.receive(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

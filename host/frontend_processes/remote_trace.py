"""The traces of requests in a frontend process: events, which the core adds to its trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.messages import FinishTrace, WireTrace
from host.inference.request import ExecutionTimes, InferRequest, InferResponse
from host.tracing.trace import TRACE_HEADERS
from stub.wire.payload import TraceLink


class RemoteTrace:
    """The part of a trace that a frontend records. Only the core knows whether it is kept."""

    def __init__(self, link: CoreLink, model: str, headers: dict[str, str]) -> None:
        self._link = link
        self._finished = self._started = False
        self._wire = WireTrace(next(link.numbers), model, headers, [])

    def take_events(self) -> WireTrace:
        """The trace with its events by now, for the message that starts its request."""
        self._started = True
        wire = self._wire
        self._wire = WireTrace(wire.number, wire.model, {}, [])
        return wire

    # The endpoint's side of `RequestTrace`

    def record_event(self, name: str, ns: int = 0) -> None:
        """Records an event, at the current time unless another is given."""
        if not self._finished:
            self._wire.events.append((name, ns or time.monotonic_ns()))

    def finish_response(self) -> None:
        """Sends the events to the core. A second call does nothing."""
        if not self._finished:
            self._finished = True
            self._link.send(FinishTrace(self._wire, self._started))

    # The model's side, which is in the core

    @property
    def trace_id(self) -> str:
        """The core has the id."""
        return ""

    @property
    def includes_tensors(self) -> bool:
        """The core records tensors."""
        return False

    def create_child(self) -> RemoteTrace:
        """Requests of models are made in the core."""
        raise AssertionError("a frontend makes no requests for others")

    def start_inference(self, request: InferRequest, model: str, version: int, ns: int) -> None:
        """Recorded in the core."""

    def reject_inference(self) -> None:
        """Recorded in the core."""

    def start_compute(self) -> TraceLink:
        """Recorded in the core."""
        raise AssertionError("a frontend sends no batches")

    def headers_for_server(self) -> dict[str, str]:
        """Recorded in the core."""
        raise AssertionError("a frontend sends no requests to other servers")

    def finish_compute(self, times: ExecutionTimes | None) -> None:
        """Recorded in the core."""

    def record_response(self, response: InferResponse | None, final: bool) -> None:
        """Recorded in the core."""


class RemoteTracer:
    """Starts the traces of a frontend process."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link

    def start_trace(self, model: str, header: Callable[[str], str | None]) -> RemoteTrace:
        """Starts the trace of a request; `header` returns a header of the client."""
        headers = {name: value for name in TRACE_HEADERS if (value := header(name)) is not None}
        return RemoteTrace(self._link, model, headers)

"""The trace of one request: its events with their times, and its tensors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor
from host.tracing.context import SpanIds
from host.tracing.tensors import tensor_json
from stub.wire.payload import TraceLink

TraceEvent = tuple[str, int]
"""The name of an event and its time in CLOCK_MONOTONIC nanoseconds."""


class TraceTree:
    """The trace of a client's request, with the traces of its BLS requests and ensemble steps.

    All of them are exported together. `on_complete` is called once, when no more events can arrive
    for any of them.
    """

    __slots__ = ("_pending", "_on_complete", "ended", "tensors", "traces")

    def __init__(self, on_complete: Callable[[TraceTree], None], tensors: bool = False) -> None:
        self.traces: list[Trace] = []
        self.tensors = tensors
        self.ended = False
        self._pending = 0
        self._on_complete = on_complete

    def add_pending(self) -> None:
        """Registers work that will still record events."""
        self._pending += 1

    def remove_pending(self) -> None:
        """Unregisters work that is finished. The last one completes the tree."""
        self._pending -= 1
        if not self._pending and not self.ended:
            self.ended = True
            self._on_complete(self)


class Trace:
    """The trace of one request. All methods must be called on the event loop.

    `number` is the id of the trace. `parent` is the id of the trace whose request made this one, 0
    if a client made it. An endpoint calls `start_response`, `record_event` and `finish_response`; a
    model calls `start_inference`, `start_compute` and `finish_compute`.
    """

    __slots__ = (
        "number",
        "parent",
        "tree",
        "span_ids",
        "model",
        "version",
        "request_id",
        "endpoint_events",
        "model_events",
        "compute_events",
        "tensors",
        "error",
        "_next_number",
        "_awaits_response",
        "_inference_started",
        "_compute_started",
    )

    def __init__(
        self,
        next_number: Callable[[Trace], int],
        tree: TraceTree,
        parent: int = 0,
        spans: SpanIds | None = None,
    ) -> None:
        self.tree = tree
        self._next_number = next_number
        self.number = next_number(self)
        self.parent = parent
        self.span_ids = spans
        self.model = ""  # set when a model accepts the request
        self.version = 0
        self.request_id = ""
        self.endpoint_events: list[TraceEvent] = []
        """Events of the endpoint."""
        self.model_events: list[TraceEvent] = []
        """Events of the model."""
        self.compute_events: list[TraceEvent] = []
        """Events of `execute`."""
        self.tensors: list[tuple[str, int, dict[str, str]]] = []
        self.error = ""
        self._awaits_response = self._inference_started = self._compute_started = False
        tree.traces.append(self)

    @property
    def trace_id(self) -> str:
        """The id as users search for it: the OpenTelemetry trace id, if there is one."""
        return str(self.number) if self.span_ids is None else f"{self.span_ids.trace_id:032x}"

    @property
    def includes_tensors(self) -> bool:
        """Whether the contents of tensors are recorded."""
        return self.tree.tensors

    def create_child(self) -> Trace:
        """Creates the trace of a BLS request or an ensemble step, for its `InferRequest.trace`.

        It is exported together with this trace. The model that accepts the request starts it.
        """
        spans = self.span_ids
        if spans is not None:
            spans = spans.for_child_request(spans.compute if self._compute_started else spans.model)
        return Trace(self._next_number, self.tree, self.number, spans)

    # Called by the endpoint

    def start_response(self) -> None:
        """Records that an endpoint waits for the responses."""
        self._awaits_response = True
        self.tree.add_pending()

    def record_event(self, name: str, ns: int = 0) -> None:
        """Records an event of the endpoint, at the time `ns` (0: now)."""
        self.endpoint_events.append((name, ns or time.monotonic_ns()))

    def finish_response(self) -> None:
        """Records that the endpoint has finished the request. A second call does nothing."""
        if self._awaits_response:
            self._awaits_response = False
            self.tree.remove_pending()

    # Called by the model

    def start_inference(self, request: InferRequest, model: str, version: int, ns: int) -> None:
        """Records that a model has accepted the request, which was received at the time `ns`."""
        if self.tree.ended:
            return  # a BLS request that outlives the request it was made for
        self._inference_started = True
        self.tree.add_pending()
        self.model, self.version, self.request_id = model, version, request.id
        self.model_events += ("REQUEST_START", ns), ("QUEUE_START", ns)
        self._record_tensors("TENSOR_QUEUE_INPUT", request.inputs)

    def reject_inference(self) -> None:
        """Records that the model has rejected the request after `start_inference`."""
        self._finish_inference()

    def start_compute(self) -> TraceLink:
        """Records that a batch with the request is sent; returns the trace context for the stub.

        `finish_compute` must follow.
        """
        if self._inference_started and not self._compute_started:
            self._compute_started = True
            self.tree.add_pending()
        spans = self.span_ids
        return TraceLink(self.number, None if spans is None else spans.trace_headers(spans.compute))

    def headers_for_server(self) -> dict[str, str]:
        """The W3C headers that name the span of the model as parent; empty without spans."""
        spans = self.span_ids
        if spans is None:
            return {}
        headers: dict[str, str] = json.loads(spans.trace_headers(spans.model))
        return headers

    def finish_compute(self, times: ExecutionTimes | None) -> None:
        """Records that the batch has ended. `times` is None if the stub process died."""
        if not self._compute_started:
            return
        self._compute_started = False  # the request may be queued and sent again
        if times is not None:
            self.compute_events += (
                ("COMPUTE_START", times.started),
                ("COMPUTE_INPUT_END", times.inputs_ready),
                ("COMPUTE_OUTPUT_START", times.outputs_begin),
                ("COMPUTE_END", times.ended),
            )
        self.tree.remove_pending()

    def record_response(self, response: InferResponse | None, final: bool) -> None:
        """Records a response, or with None only the end of the responses."""
        if response is not None:
            if response.error is not None:
                self.error = response.error.status_string
            else:
                self._record_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
        if final:
            now = time.monotonic_ns()
            if self._awaits_response:
                self.record_event("INFER_RESPONSE_COMPLETE", now)
            if self._inference_started:
                self.model_events.append(("REQUEST_END", now))
            self._finish_inference()

    def _finish_inference(self) -> None:
        if self._inference_started:
            self._inference_started = False
            self.tree.remove_pending()

    def _record_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        if self.tree.tensors:
            now = time.monotonic_ns()
            self.tensors += [(activity, now, tensor_json(tensor)) for tensor in tensors]

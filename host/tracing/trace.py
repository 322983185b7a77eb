"""A request that is traced: how far it has come when, and with what tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor
from host.tracing.context import SpanIds
from host.tracing.tensors import tensor_json
from stub.wire.payload import TraceLink

TraceEvent = tuple[str, int]
"""What has happened, and when: CLOCK_MONOTONIC nanoseconds."""


class TraceTree:
    """A trace and those of what models asked on its behalf, which are told of together.

    `on_complete` is called once, when nothing is to come of any of them.
    """

    __slots__ = ("_pending", "_on_complete", "ended", "tensors", "traces")

    def __init__(self, on_complete: Callable[[TraceTree], None], tensors: bool = False) -> None:
        self.traces: list[Trace] = []
        self.tensors = tensors
        self.ended = False
        self._pending = 0
        self._on_complete = on_complete

    def add_pending(self) -> None:
        """Something is to come."""
        self._pending += 1

    def remove_pending(self) -> None:
        """It has come."""
        self._pending -= 1
        if not self._pending and not self.ended:
            self.ended = True
            self._on_complete(self)


class Trace:
    """One request. All methods belong to the event loop's thread.

    `number` is the trace's id, `parent` that of the trace whose request made this one, 0 without
    one. An endpoint says by `start_response` and `finish_response` that it waits for the responses,
    and records what it does; the model says by `start_inference` that it has
    accepted the request.
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
        self.model = ""  # not known before a model has accepted the request
        self.version = 0
        self.request_id = ""
        self.endpoint_events: list[TraceEvent] = []
        """At the door."""
        self.model_events: list[TraceEvent] = []
        """At the model."""
        self.compute_events: list[TraceEvent] = []
        """In `execute`."""
        self.tensors: list[tuple[str, int, dict[str, str]]] = []
        self.error = ""
        self._awaits_response = self._inference_started = self._compute_started = False
        tree.traces.append(self)

    @property
    def trace_id(self) -> str:
        """The trace's id as it is looked for: that of the spans if there are any."""
        return str(self.number) if self.span_ids is None else f"{self.span_ids.trace_id:032x}"

    @property
    def includes_tensors(self) -> bool:
        """Whether the content of tensors is part of it."""
        return self.tree.tensors

    def create_child(self) -> Trace:
        """The trace of a request that is made on behalf of this one, for its `InferRequest.trace`.

        It is part of the same file elements, or spans; the model that takes the request begins it.
        """
        spans = self.span_ids
        if spans is not None:
            spans = spans.for_child_request(spans.compute if self._compute_started else spans.model)
        return Trace(self._next_number, self.tree, self.number, spans)

    # The door

    def start_response(self) -> None:
        """A door waits for the responses."""
        self._awaits_response = True
        self.tree.add_pending()

    def record_event(self, name: str, ns: int = 0) -> None:
        """Something happens at the door, now unless another time is given."""
        self.endpoint_events.append((name, ns or time.monotonic_ns()))

    def finish_response(self) -> None:
        """The door has nothing more to do. A second call does nothing."""
        if self._awaits_response:
            self._awaits_response = False
            self.tree.remove_pending()

    # The model

    def start_inference(self, request: InferRequest, model: str, version: int, ns: int) -> None:
        """The model takes the request, which was received at this time."""
        if self.tree.ended:
            return  # it is asked on behalf of a request that has long been answered
        self._inference_started = True
        self.tree.add_pending()
        self.model, self.version, self.request_id = model, version, request.id
        self.model_events += ("REQUEST_START", ns), ("QUEUE_START", ns)
        self._record_tensors("TENSOR_QUEUE_INPUT", request.inputs)

    def reject_inference(self) -> None:
        """It does not take it after all."""
        self._finish_inference()

    def start_compute(self) -> TraceLink:
        """The request goes to an instance: what that may know. `finish_compute` follows."""
        if self._inference_started and not self._compute_started:
            self._compute_started = True
            self.tree.add_pending()
        spans = self.span_ids
        return TraceLink(self.number, None if spans is None else spans.trace_headers(spans.compute))

    def finish_compute(self, times: ExecutionTimes | None) -> None:
        """Its batch has ended; without times, because the stub died."""
        if not self._compute_started:
            return
        self._compute_started = False  # it may be queued and sent again
        if times is not None:
            self.compute_events += (
                ("COMPUTE_START", times.started),
                ("COMPUTE_INPUT_END", times.inputs_ready),
                ("COMPUTE_OUTPUT_START", times.outputs_begin),
                ("COMPUTE_END", times.ended),
            )
        self.tree.remove_pending()

    def record_response(self, response: InferResponse | None, final: bool) -> None:
        """A response is there, or with None only the end."""
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

"""The trace of one request: its context from the client, its timestamps and its tensors."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from host.errors import HostError
from host.inference.request import (
    Buffer,
    ExecutionTimes,
    InferRequest,
    InferResponse,
    RequestTrace,
    Tensor,
    read_bytes,
)
from stub.wire.messages import TraceLink

Header = Callable[[str], str | None]
"""Returns the value of a request header or metadata key, by its lowercase name."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers that `parse_trace_context` reads."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """The span of the client that a request belongs to; `state` is its `tracestate` header."""

    trace: int
    span: int
    state: str = ""


def parse_trace_context(header: Header) -> RemoteSpan | None:
    """Parses the headers `traceparent` and `tracestate`; None without a valid `traceparent`."""
    text = header("traceparent")
    found = None if text is None else _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span = found[1], int(found[2], 16), int(found[3], 16)
    if not trace or not span or version == "ff" or (version == "00" and found[5]):
        return None
    return RemoteSpan(trace, span, header("tracestate") or "")


@dataclass(frozen=True, slots=True)
class SpanIds:
    """The OpenTelemetry span ids of one request to one model.

    `parent` is the span above the request, 0 if there is none. `root` is the span of the endpoint
    that received the request, 0 for a BLS request or an ensemble step. `model` and `compute` are
    the spans of the model and of its `execute`. `state` is the `tracestate` of the client.
    """

    trace_id: int
    parent: int
    root: int
    model: int
    compute: int
    state: str = ""

    @classmethod
    def for_client_request(cls, remote: RemoteSpan | None) -> SpanIds:
        """New span ids for a request of a client, in its trace if it has sent one."""
        if remote is None:
            return cls(_random_id(128), 0, _random_id(64), _random_id(64), _random_id(64))
        new_ids = _random_id(64), _random_id(64), _random_id(64)
        return cls(remote.trace, remote.span, *new_ids, state=remote.state)

    def for_child_request(self, parent: int) -> SpanIds:
        """New span ids for a BLS request or an ensemble step of this request."""
        return SpanIds(self.trace_id, parent, 0, _random_id(64), _random_id(64), self.state)

    def trace_headers(self, span: int) -> str:
        """The W3C headers that name `span` as the parent, as JSON."""
        headers = {"traceparent": f"00-{self.trace_id:032x}-{span:016x}-01"}
        if self.state:
            headers["tracestate"] = self.state
        return json.dumps(headers, separators=(",", ":"))


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1


_TYPES = {
    "BOOL": "u1",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP32": "<f4",
    "FP64": "<f8",
}


def tensor_json(tensor: Tensor) -> dict[str, str]:
    """A tensor as JSON-ready data. The elements of FP16 and BF16 are omitted, as Triton does.

    Elements in memory of a client that is gone are omitted too: the request itself reports that.
    """
    try:
        data = elements(tensor.datatype, read_bytes(tensor.data))
    except HostError:
        data = ""
    return {
        "name": tensor.name,
        "data": data,
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }


def elements(datatype: str, data: Buffer) -> str:
    """Formats the elements of a tensor of a wire datatype, joined by commas.

    Floats have six significant digits. Strings are in quotation marks, and bytes in them that are
    not UTF-8 are written as backslash escapes.
    """
    if datatype == "BYTES":
        return ",".join(f'"{text.decode(errors="backslashreplace")}"' for text in _strings(data))
    kind = _TYPES.get(datatype)
    if kind is None:
        return ""
    values = np.frombuffer(data, dtype=kind).tolist()
    if kind[1:2] == "f":
        return ",".join("%g" % value for value in values)  # noqa: UP031  (same digits as a C++ stream)
    return ",".join(map(str, values))


def _strings(data: Buffer) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        begin = position + 4
        position = begin + int.from_bytes(data[position:begin], "little")
        yield bytes(data[begin:position])


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


class Trace(RequestTrace):
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

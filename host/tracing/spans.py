"""Exports traces as OpenTelemetry spans by OTLP over HTTP (docs/reference/metrics.md,
"OpenTelemetry").

OpenTelemetry is an optional dependency, and only this module of the host imports it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from host.errors import HostError, unavailable
from host.tracing.trace import Trace, TraceEvent, TraceTree
from host.tracing.trace_settings import TraceConfig, TraceSetting

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
    from opentelemetry.trace.status import Status, StatusCode

    MISSING: ImportError | None = None
except ImportError as error:
    MISSING = error

_log = logging.getLogger("pbhost")

_TRACER = "triton-server"
_SERVICE = "triton-inference-server"


def not_installed(missing: ImportError) -> HostError:
    """The error that says how to install OpenTelemetry."""
    return unavailable(
        "--trace-config: mode opentelemetry needs the OpenTelemetry SDK, which is not installed"
        f" ({missing}); install it by: pip install 'pbhost[otel]'"
    )


class SpanSink:
    """Exports each trace as spans, in batches, from a thread of OpenTelemetry.

    `on_complete` is called with every complete trace. Raises HostError UNAVAILABLE if OpenTelemetry
    is not installed.
    """

    def __init__(self, config: TraceConfig, on_complete: Callable[[TraceTree], None]) -> None:
        if MISSING is not None:
            raise not_installed(MISSING)
        self._on_complete = on_complete
        _HostLog.install()
        attributes = dict(config.resource)
        self._resource = Resource.create(
            attributes if "service.name" in attributes else {"service.name": _SERVICE, **attributes}
        )
        self._scope = InstrumentationScope(_TRACER)
        batching = config.batching
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=config.url),
            batching["bsp_max_queue_size"],
            batching["bsp_schedule_delay"],
            min(batching["bsp_max_export_batch_size"], batching["bsp_max_queue_size"]),
        )

    def write_tree(self, setting: TraceSetting, tree: TraceTree) -> None:
        """Passes the spans of a complete trace to the exporter."""
        self._on_complete(tree)
        # Events have monotonic times and spans need wall-clock times.
        offset = time.time_ns() - time.monotonic_ns()
        for trace in tree.traces:
            for span in self._spans(trace, offset):
                self._processor.on_end(span)

    def flush_setting(self, setting: TraceSetting) -> None:
        """Does nothing: the exporter has no buffer per setting."""

    def close(self) -> None:
        """Sends the remaining spans; block until they have arrived or failed."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, trace: Trace, offset: int) -> Iterator[ReadableSpan]:
        ids = trace.span_ids
        assert ids is not None
        parent_id = ids.parent
        if ids.root:
            yield self._span(
                trace,
                "InferRequest",
                ids.root,
                parent_id,
                trace.endpoint_events,
                offset,
                SpanKind.SERVER,
            )
            parent_id = ids.root
        if trace.model_events:
            yield self._span(trace, trace.model, ids.model, parent_id, trace.model_events, offset)
        if trace.compute_events:
            yield self._span(trace, "compute", ids.compute, ids.model, trace.compute_events, offset)

    def _span(
        self,
        trace: Trace,
        name: str,
        number: int,
        parent_id: int,
        events: Sequence[TraceEvent],
        offset: int,
        kind: SpanKind | None = None,
    ) -> ReadableSpan:
        ids = trace.span_ids
        assert ids is not None
        state = TraceState.from_header([ids.state]) if ids.state else TraceState()
        times = [ns + offset for _, ns in events] or [time.time_ns()]
        failed = trace.error and name != "compute"
        return ReadableSpan(
            name,
            SpanContext(ids.trace_id, number, False, TraceFlags(TraceFlags.SAMPLED), state),
            SpanContext(ids.trace_id, parent_id, True, TraceFlags(TraceFlags.SAMPLED), state)
            if parent_id
            else None,
            self._resource,
            _attributes(trace) if number == ids.model else {},
            [Event(event, timestamp=ns + offset) for event, ns in events],
            kind=kind or SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, trace.error) if failed else Status(),
            start_time=min(times),
            end_time=max(times),
            instrumentation_scope=self._scope,
        )


def _attributes(trace: Trace) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "triton.model_name": trace.model,
        "triton.model_version": trace.version,
        "triton.trace_id": trace.number,
        "triton.trace_parent_id": trace.parent,
    }
    if trace.request_id:
        attributes["triton.request_id"] = trace.request_id
    return attributes


class _HostLog(logging.Handler):
    """Copies log records of OpenTelemetry, such as a failed export, to the host's log."""

    @classmethod
    def install(cls) -> None:
        logger = logging.getLogger("opentelemetry")
        if not any(isinstance(handler, cls) for handler in logger.handlers):
            logger.addHandler(cls())
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Logs one record, followed by the message of its exception."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]}"
        _log.log(record.levelno, "traces: %s", text)

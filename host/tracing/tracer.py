"""The tracer of a server: starts traces, and holds the trace settings and the exporter."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from host.tracing.config import OPENTELEMETRY, TraceConfig
from host.tracing.context import Header, SpanIds, parse_trace_context
from host.tracing.files import FileSink, TraceFile
from host.tracing.settings import DescribedSettings, SettingChanges, TraceSettings
from host.tracing.trace import Trace, TraceTree
from host.tracing.trace_setting import TraceSink

if TYPE_CHECKING:
    from host.tracing.spans import SpanSink


class Tracer:
    """Traces the requests of one server. All methods must be called on the event loop.

    In mode opentelemetry, raises HostError UNAVAILABLE if OpenTelemetry is not installed.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._numbers = itertools.count(1)
        self._live_traces: dict[int, Trace] = {}  # traces that may still get child traces
        self._file: TraceFile | None = None
        self._spans: SpanSink | None = None
        sink: TraceSink
        if config.mode == OPENTELEMETRY:
            from host.tracing.spans import SpanSink  # imports optional dependencies

            sink = self._spans = SpanSink(config, self._remove_tree)
        else:
            self._file = TraceFile(config.file)
            sink = FileSink(self._file, self._remove_tree)
        self._settings = TraceSettings(config, sink)

    @property
    def enabled(self) -> bool:
        """Whether requests of any model may be traced."""
        return self._settings.enabled

    # Requests

    def start_trace(self, model: str, header: Header) -> Trace | None:
        """Starts the trace of a request to a model; None if the request is not traced."""
        setting = self._settings.find(model)
        if not setting.enabled:
            return None
        remote = parse_trace_context(header) if self._spans is not None else None
        tree = setting.sample_request(forced=remote is not None)
        if tree is None:
            return None
        spans = SpanIds.for_client_request(remote) if self._spans is not None else None
        trace = Trace(self._assign_number, tree, spans=spans)
        trace.start_response()
        return trace

    def find_trace(self, number: int) -> Trace | None:
        """The trace with this id, if it may still get child traces."""
        return self._live_traces.get(number)

    def _assign_number(self, trace: Trace) -> int:
        number = next(self._numbers)
        if not trace.tree.ended:  # `_remove_tree` has run already and would not remove it
            self._live_traces[number] = trace
        return number

    def _remove_tree(self, tree: TraceTree) -> None:
        for trace in tree.traces:
            self._live_traces.pop(trace.number, None)

    # Settings

    def describe_settings(self, model: str = "") -> DescribedSettings:
        """The trace settings of a model, or the global ones if `model` is ""."""
        return self._settings.describe(model)

    def update_settings(self, model: str, change: SettingChanges) -> DescribedSettings:
        """Changes settings and returns them. Raises HostError, and changes nothing then."""
        self._settings.update(model, change)
        return self._settings.describe(model)

    # Shutdown

    def close(self) -> None:
        """Writes or sends all complete traces. Blocks on the disk or the network."""
        self._settings.retire_all()
        if self._file is not None:
            self._file.close()
        if self._spans is not None:
            self._spans.close()

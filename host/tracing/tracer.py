"""Decides which requests are traced, and tells where their traces go once they are complete."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from host.tracing.config import OPENTELEMETRY, TraceConfig
from host.tracing.context import Header, SpanIds, parse_trace_context
from host.tracing.files import FileSink, TraceFile
from host.tracing.setting import TraceSink
from host.tracing.settings import DescribedSettings, SettingChanges, TraceSettings
from host.tracing.trace import Trace, TraceTree

if TYPE_CHECKING:
    from host.tracing.spans import SpanSink


class Tracer:
    """The traces of one server. Belongs to the event loop.

    In mode opentelemetry, construction raises HostError if what it needs is not installed.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._numbers = itertools.count(1)
        self._live_traces: dict[int, Trace] = {}  # those that may still get children
        self._file: TraceFile | None = None
        self._spans: SpanSink | None = None
        sink: TraceSink
        if config.mode == OPENTELEMETRY:
            from host.tracing.spans import SpanSink  # it needs libraries of an extra

            sink = self._spans = SpanSink(config, self._remove_tree)
        else:
            self._file = TraceFile(config.file)
            sink = FileSink(self._file, self._remove_tree)
        self._settings = TraceSettings(config, sink)

    @property
    def enabled(self) -> bool:
        """Whether any requests might be traced."""
        return self._settings.enabled

    # Requests

    def start_trace(self, model: str, header: Header) -> Trace | None:
        """The trace of a request to a model, open at its door; None if it is not to be traced."""
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
        """A trace that may still get children."""
        return self._live_traces.get(number)

    def _assign_number(self, trace: Trace) -> int:
        number = next(self._numbers)
        if not trace.tree.ended:  # otherwise nobody would ever forget it
            self._live_traces[number] = trace
        return number

    def _remove_tree(self, tree: TraceTree) -> None:
        for trace in tree.traces:
            self._live_traces.pop(trace.number, None)

    # Settings

    def describe_settings(self, model: str = "") -> DescribedSettings:
        """The settings of a model, or with "" those of all that have none of their own."""
        return self._settings.describe(model)

    def update_settings(self, model: str, change: SettingChanges) -> DescribedSettings:
        """Change settings, and return them all. Raises HostError, and has then changed nothing."""
        self._settings.update(model, change)
        return self._settings.describe(model)

    # The end

    def close(self) -> None:
        """Write down, or send, all that is complete; waits for disks and for the network."""
        self._settings.retire_all()
        if self._file is not None:
            self._file.close()
        if self._spans is not None:
            self._spans.close()

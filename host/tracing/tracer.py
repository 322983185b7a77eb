"""Decides which requests are traced, and tells where their traces go once they are complete."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from host.tracing.config import OPENTELEMETRY, TraceConfig
from host.tracing.context import Header, Spans, extract
from host.tracing.files import FileSink, TraceFile
from host.tracing.setting import Sink
from host.tracing.settings import Change, Shown, TraceSettings
from host.tracing.trace import Family, Trace

if TYPE_CHECKING:
    from host.tracing.spans import SpanSink


class Tracer:
    """The traces of one server. Belongs to the event loop.

    In mode opentelemetry, construction raises HostError if what it needs is not installed.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._numbers = itertools.count(1)
        self._live: dict[int, Trace] = {}  # those that may still get children
        self._file: TraceFile | None = None
        self._spans: SpanSink | None = None
        sink: Sink
        if config.mode == OPENTELEMETRY:
            from host.tracing.spans import SpanSink  # it needs libraries of an extra

            sink = self._spans = SpanSink(config, self._forget)
        else:
            self._file = TraceFile(config.file)
            sink = FileSink(self._file, self._forget)
        self._settings = TraceSettings(config, sink)

    @property
    def on(self) -> bool:
        """Whether any requests might be traced."""
        return self._settings.on

    # Requests

    def start(self, model: str, header: Header) -> Trace | None:
        """The trace of a request to a model, open at its door; None if it is not to be traced."""
        setting = self._settings.find(model)
        if not setting.on:
            return None
        outside = extract(header) if self._spans is not None else None
        family = setting.sample(forced=outside is not None)
        if family is None:
            return None
        spans = Spans.at_door(outside) if self._spans is not None else None
        trace = Trace(self._number, family, spans=spans)
        trace.open()
        return trace

    def find(self, number: int) -> Trace | None:
        """A trace that may still get children."""
        return self._live.get(number)

    def _number(self, trace: Trace) -> int:
        number = next(self._numbers)
        if not trace.family.ended:  # otherwise nobody would ever forget it
            self._live[number] = trace
        return number

    def _forget(self, family: Family) -> None:
        for trace in family.traces:
            self._live.pop(trace.number, None)

    # Settings

    def describe(self, model: str = "") -> Shown:
        """The settings of a model, or with "" those of all that have none of their own."""
        return self._settings.describe(model)

    def update(self, model: str, change: Change) -> Shown:
        """Change settings, and return them all. Raises HostError, and has then changed nothing."""
        self._settings.update(model, change)
        return self._settings.describe(model)

    # The end

    def close(self) -> None:
        """Write down, or send, all that is complete; waits for disks and for the network."""
        self._settings.end()
        if self._file is not None:
            self._file.close()
        if self._spans is not None:
            self._spans.close()

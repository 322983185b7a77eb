"""The tracer: samples requests, and writes their traces."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from host.tracing.trace import Header, SpanIds, Trace, TraceTree, parse_trace_context
from host.tracing.trace_settings import (
    OPENTELEMETRY,
    DescribedSettings,
    SettingChanges,
    TraceConfig,
    TraceSetting,
    TraceSettings,
    TraceSink,
)

_log = logging.getLogger("pbhost")

_MAX_BUFFERED = 100  # traces per write if neither log_frequency nor a count is set


def tree_json(tree: TraceTree, timestamps: bool) -> str:
    """The JSON elements of a trace and of its child traces, joined by commas."""
    return ",".join(
        json.dumps(element, separators=(",", ":"))
        for trace in tree.traces
        for element in _elements(trace, timestamps)
    )


def _elements(trace: Trace, timestamps: bool) -> list[dict[str, object]]:
    number = trace.number
    first: list[dict[str, object]] = []
    if trace.model:
        head: dict[str, object] = {
            "id": number,
            "model_name": trace.model,
            "model_version": trace.version,
        }
        if trace.request_id:
            head["request_id"] = trace.request_id
        if trace.parent:
            head["parent_id"] = trace.parent
        first.append(head)
    rest: list[tuple[int, dict[str, object]]] = []
    if timestamps:
        for name, ns in (*trace.endpoint_events, *trace.model_events, *trace.compute_events):
            rest.append((ns, {"id": number, "timestamps": [{"name": name, "ns": ns}]}))
    for activity, ns, tensor in trace.tensors:
        rest.append((ns, {"id": number, "activity": activity, "tensor": tensor}))
    rest.sort(key=lambda item: item[0])
    return first + [element for _, element in rest]


class FileSink:
    """Buffers the traces of each setting; writes the files `path`, `path.0`, `path.1`, ...

    A thread writes the files, so the event loop never waits for the disk. A failed write is logged
    and its traces are lost. `on_complete` is called with every complete trace.
    """

    def __init__(self, path: str, on_complete: Callable[[TraceTree], None]) -> None:
        self._path = path
        self._on_complete = on_complete
        self._index = 0
        self._created = False  # the file without a number
        self._thread = ThreadPoolExecutor(1, "pbhost-traces")

    def write_tree(self, setting: TraceSetting, tree: TraceTree) -> None:
        """Buffers a trace; writes the buffer every `log_frequency` traces, and after `count`.

        Without a frequency and a count, the traces go to the file without a number in its name, so
        the buffer only saves writes.
        """
        values, buffer = setting.values, setting.buffer
        buffer.append(tree_json(tree, setting.timestamps))
        self._on_complete(tree)
        if values.log_frequency and len(buffer) >= values.log_frequency:
            self._write_buffer(setting, numbered=True)
        elif not setting.remaining and not setting.pending_traces:
            self._write_buffer(setting, numbered=True)
        elif not values.log_frequency and values.count < 0 and len(buffer) >= _MAX_BUFFERED:
            self._write_buffer(setting, numbered=False)

    def flush_setting(self, setting: TraceSetting) -> None:
        """Writes the traces that are still in the buffer."""
        self._write_buffer(setting, numbered=bool(setting.values.log_frequency))

    def _write_buffer(self, setting: TraceSetting, numbered: bool) -> None:
        """Writes to the next numbered file, or appends to the one without a number."""
        buffer, setting.buffer = setting.buffer, []
        if not buffer:
            return
        path, write = self._path, _write_file
        if numbered:
            path, self._index = f"{path}.{self._index}", self._index + 1
        elif self._created:
            write = _append_to_file
        else:
            self._created = True  # the first write replaces an old file
        self._thread.submit(write, path, ",".join(buffer))

    def close(self) -> None:
        """Waits until everything is written."""
        self._thread.shutdown()


def _write_file(path: str, elements: str) -> None:
    """Creates or replaces a file that is a JSON array of these elements."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"[{elements}]")
    except OSError as error:
        _log.error("traces cannot be written to '%s': %s", path, error.strerror or error)


def _append_to_file(path: str, elements: str) -> None:
    """Appends elements to the JSON array in a file."""
    try:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(f",{elements}]".encode())
    except OSError as error:
        _log.error("traces cannot be written to '%s': %s", path, error.strerror or error)


class Tracer:
    """Traces the requests of one server. All methods must be called on the event loop.

    In mode opentelemetry, raises HostError UNAVAILABLE if OpenTelemetry is not installed.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._numbers = itertools.count(1)
        self._live_traces: dict[int, Trace] = {}  # traces that may still get child traces
        self._has_spans = config.mode == OPENTELEMETRY
        if self._has_spans:
            from host.tracing.spans import SpanSink  # imports optional dependencies

            self._sink: TraceSink = SpanSink(config, self._remove_tree)
        else:
            self._sink = FileSink(config.file, self._remove_tree)
        self._settings = TraceSettings(config, self._sink)

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
        remote = parse_trace_context(header) if self._has_spans else None
        tree = setting.sample_request(forced=remote is not None)
        if tree is None:
            return None
        spans = SpanIds.for_client_request(remote) if self._has_spans else None
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
        self._sink.close()

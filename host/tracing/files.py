"""Traces as JSON, and the files that they are written to (protocol spec 7.2)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from host.tracing.setting import TraceSetting
from host.tracing.trace import Trace, TraceTree

_log = logging.getLogger("pbhost")

_MAX_BUFFERED = 100  # traces to one write, where nothing says when


def tree_json(tree: TraceTree, timestamps: bool) -> str:
    """The elements of a trace and its children, with commas between them."""
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
    """Collects the traces of a setting until it is time to write them."""

    def __init__(self, file: TraceFile, on_complete: Callable[[TraceTree], None]) -> None:
        self._file = file
        self._on_complete = on_complete

    def write_tree(self, setting: TraceSetting, tree: TraceTree) -> None:
        """Write when the setting's frequency says so, and when its last trace has come.

        Without either, it is the same when they are written to the file that has no number.
        """
        values, collected = setting.values, setting.buffer
        collected.append(tree_json(tree, setting.timestamps))
        self._on_complete(tree)
        if values.log_frequency and len(collected) >= values.log_frequency:
            self._write_file(setting, self._file.write_next)
        elif not setting.remaining and not setting.pending_traces:
            self._write_file(setting, self._file.write_next)
        elif not values.log_frequency and values.count < 0 and len(collected) >= _MAX_BUFFERED:
            self._write_file(setting, self._file.append)

    def flush_setting(self, setting: TraceSetting) -> None:
        """Write what is left."""
        file = self._file
        self._write_file(setting, file.write_next if setting.values.log_frequency else file.append)

    def _write_file(self, setting: TraceSetting, write: Callable[[list[str]], None]) -> None:
        collected, setting.buffer = setting.buffer, []
        if collected:
            write(collected)


class TraceFile:
    """The file of that path, and those that are called like it with `.0`, `.1`, ... behind.

    A thread of its own writes them, so that nothing else waits for a disk. What cannot be written
    is logged and lost.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._index = 0
        self._created = False
        self._thread = ThreadPoolExecutor(1, "pbhost-traces")

    def append(self, traces: Sequence[str]) -> None:
        """Add to the file itself."""
        write = _append_to_file if self._created else _write_file
        self._created = True
        self._thread.submit(write, self.path, ",".join(traces))

    def write_next(self, traces: Sequence[str]) -> None:
        """Write the next file with a number."""
        path = f"{self.path}.{self._index}"
        self._index += 1
        self._thread.submit(_write_file, path, ",".join(traces))

    def close(self) -> None:
        """Wait until all is written."""
        self._thread.shutdown()


def _write_file(path: str, elements: str) -> None:
    """Write a file of these elements."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"[{elements}]")
    except OSError as error:
        _log.error("traces cannot be written to '%s': %s", path, error.strerror or error)


def _append_to_file(path: str, elements: str) -> None:
    """Add elements to a file that is complete, and leave it so."""
    try:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(f",{elements}]".encode())
    except OSError as error:
        _log.error("traces cannot be written to '%s': %s", path, error.strerror or error)

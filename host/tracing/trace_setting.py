"""The trace setting of one scope: samples its requests and counts the traces not yet complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from host.tracing.config import TENSORS, TIMESTAMPS
from host.tracing.trace import TraceTree


@dataclass(frozen=True, slots=True)
class TraceSettingValues:
    """The values of one trace setting; `TraceConfig` says what they mean."""

    level: frozenset[str]
    rate: int
    count: int
    log_frequency: int


class TraceSink(Protocol):
    """Receives complete traces and writes or sends them."""

    def write_tree(self, setting: TraceSetting, tree: TraceTree) -> None:
        """Accepts a complete trace, which `setting` has sampled."""

    def flush_setting(self, setting: TraceSetting) -> None:
        """Writes what is buffered for a setting that is replaced and whose traces are complete."""


class TraceSetting:
    """Decides which requests of one scope (all models, or one model) are traced.

    The values of a setting never change. A change makes a new setting and retires this one.
    `buffer` is for the sink: traces that are not yet written. `remaining` is how many traces may
    still be started, or -1 for no limit.
    """

    def __init__(self, values: TraceSettingValues, sink: TraceSink) -> None:
        self.values = values
        self.remaining = values.count
        self.buffer: list[str] = []
        self.pending_traces = 0
        """Traces that are started and not yet complete."""
        self._request_count = 0
        self._sink = sink
        self._retired = False

    @property
    def enabled(self) -> bool:
        """Whether the level is not OFF."""
        return bool(self.values.level)

    @property
    def timestamps(self) -> bool:
        """Whether the level has TIMESTAMPS."""
        return TIMESTAMPS in self.values.level

    @property
    def tensors(self) -> bool:
        """Whether the level has TENSORS."""
        return TENSORS in self.values.level

    def remaining_values(self) -> TraceSettingValues:
        """The values, with the remaining count instead of the original one."""
        values = self.values
        return TraceSettingValues(values.level, values.rate, self.remaining, values.log_frequency)

    def sample_request(self, forced: bool) -> TraceTree | None:
        """Counts a request. Returns a new trace tree if the request is traced, else None.

        A `forced` request is always traced, whatever the rate and the remaining count are.
        """
        sampled = False
        if self.values.rate and self.remaining:
            self._request_count += 1
            sampled = self._request_count % self.values.rate == 0
            if sampled and self.remaining > 0:
                self.remaining -= 1
        if not (sampled or forced):
            return None
        self.pending_traces += 1
        return TraceTree(self._on_complete, self.tensors)

    def _on_complete(self, tree: TraceTree) -> None:
        self.pending_traces -= 1
        self._sink.write_tree(self, tree)
        if self._retired and not self.pending_traces:
            self._sink.flush_setting(self)

    def retire(self) -> None:
        """Marks the setting as replaced. The sink flushes it when its last trace is complete."""
        self._retired = True
        if not self.pending_traces:
            self._sink.flush_setting(self)

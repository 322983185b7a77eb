"""The trace setting of one scope: which of its requests are traced, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from host.tracing.config import TENSORS, TIMESTAMPS
from host.tracing.trace import TraceTree


@dataclass(frozen=True, slots=True)
class TraceSettingValues:
    """What a setting consists of; see TraceConfig."""

    level: frozenset[str]
    rate: int
    count: int
    log_frequency: int


class TraceSink(Protocol):
    """Where the traces of a setting go."""

    def write_tree(self, setting: TraceSetting, tree: TraceTree) -> None:
        """A trace is complete."""

    def flush_setting(self, setting: TraceSetting) -> None:
        """The setting has ended, and so have all its traces."""


class TraceSetting:
    """Counts the requests of its scope. It is replaced, not changed: `retire` is then called.

    `buffer` is what its sink keeps for it.
    """

    def __init__(self, values: TraceSettingValues, sink: TraceSink) -> None:
        self.values = values
        self.remaining = values.count
        self.buffer: list[str] = []
        self.pending_traces = 0
        """Traces that are not complete."""
        self._request_count = 0
        self._sink = sink
        self._retired = False

    @property
    def enabled(self) -> bool:
        """Whether any requests might be traced."""
        return bool(self.values.level)

    @property
    def timestamps(self) -> bool:
        """Whether times are noted."""
        return TIMESTAMPS in self.values.level

    @property
    def tensors(self) -> bool:
        """Whether tensors are noted."""
        return TENSORS in self.values.level

    def remaining_values(self) -> TraceSettingValues:
        """The values, with the count that is left."""
        values = self.values
        return TraceSettingValues(values.level, values.rate, self.remaining, values.log_frequency)

    def sample_request(self, forced: bool) -> TraceTree | None:
        """Count a request; the tree of its trace if it is to be traced.

        A `forced` one always is, whatever rate and count say.
        """
        chosen = False
        if self.values.rate and self.remaining:
            self._request_count += 1
            chosen = self._request_count % self.values.rate == 0
            if chosen and self.remaining > 0:
                self.remaining -= 1
        if not (chosen or forced):
            return None
        self.pending_traces += 1
        return TraceTree(self._complete, self.tensors)

    def _complete(self, tree: TraceTree) -> None:
        self.pending_traces -= 1
        self._sink.write_tree(self, tree)
        if self._retired and not self.pending_traces:
            self._sink.flush_setting(self)

    def retire(self) -> None:
        """Another setting takes its place; the sink hears of the end when all is complete."""
        self._retired = True
        if not self.pending_traces:
            self._sink.flush_setting(self)

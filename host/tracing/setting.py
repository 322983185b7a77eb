"""The trace setting of one scope: which of its requests are traced, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from host.tracing.config import TENSORS, TIMESTAMPS
from host.tracing.trace import Family


@dataclass(frozen=True, slots=True)
class Values:
    """What a setting consists of; see TraceConfig."""

    level: frozenset[str]
    rate: int
    count: int
    log_frequency: int


class Sink(Protocol):
    """Where the traces of a setting go."""

    def take(self, setting: Setting, family: Family) -> None:
        """A trace is complete."""

    def flush(self, setting: Setting) -> None:
        """The setting has ended, and so have all its traces."""


class Setting:
    """Counts the requests of its scope. It is replaced, not changed: `end` is then called.

    `collected` is what its sink keeps for it.
    """

    def __init__(self, values: Values, sink: Sink) -> None:
        self.values = values
        self.left = values.count
        self.collected: list[str] = []
        self.pending = 0
        """Traces that are not complete."""
        self._seen = 0
        self._sink = sink
        self._ended = False

    @property
    def on(self) -> bool:
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

    def current(self) -> Values:
        """The values, with the count that is left."""
        values = self.values
        return Values(values.level, values.rate, self.left, values.log_frequency)

    def sample(self, forced: bool) -> Family | None:
        """Count a request; the family of its trace if it is to be traced.

        A `forced` one always is, whatever rate and count say.
        """
        chosen = False
        if self.values.rate and self.left:
            self._seen += 1
            chosen = self._seen % self.values.rate == 0
            if chosen and self.left > 0:
                self.left -= 1
        if not (chosen or forced):
            return None
        self.pending += 1
        return Family(self._complete, self.tensors)

    def _complete(self, family: Family) -> None:
        self.pending -= 1
        self._sink.take(self, family)
        if self._ended and not self.pending:
            self._sink.flush(self)

    def end(self) -> None:
        """Another setting takes its place; the sink hears of the end when all is complete."""
        self._ended = True
        if not self.pending:
            self._sink.flush(self)

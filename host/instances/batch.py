"""Calls that run together, and when they got how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from host.inference import Call


@dataclass(slots=True)
class Times:
    """When a batch got how far: CLOCK_MONOTONIC nanoseconds."""

    started: int
    inputs_ready: int
    outputs_begin: int
    ended: int


class Batch:
    """Calls that run together; `done` is called once, with the times or None if the stub died."""

    __slots__ = ("calls", "done", "number")

    def __init__(self, calls: Sequence[Call], done: Callable[[Batch, Times | None], None]) -> None:
        self.calls = calls
        self.done = done
        self.number = 0

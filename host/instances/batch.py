"""Calls that run together, and when they got how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host.inference.request import Call, Times


class Batch:
    """Calls that run together.

    `done` is called once its end is known, with the times or None if the stub died, and `released`
    once the instance can take the next batch, unless its stub dies first. `report` is what counts
    it, and may come after the answers. The calls at the indexes `late` are answered after that.
    """

    __slots__ = ("calls", "done", "finals", "free", "late", "number", "released", "report")

    def __init__(
        self,
        calls: Sequence[Call],
        released: Callable[[], None],
        done: Callable[[Times | None], None],
        report: Callable[[Batch, Times], None],
    ) -> None:
        self.calls = calls
        self.released = released
        self.done = done
        self.report = report
        self.number = 0
        self.free = False  # the instance no longer works on it
        self.late: Sequence[int] = ()
        self.finals: list[int] = []  # the indexes that the stub has answered for good

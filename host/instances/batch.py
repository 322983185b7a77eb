"""Calls that run together, and when they got how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host.inference.request import Call, ExecutionTimes


class Batch:
    """Calls that run together.

    `on_done` is called once its end is known, with the times or None if the stub died, and
    `on_released` once the instance can take the next batch, unless its stub dies first. `report` is
    what counts it, and may come after the answers. The calls at the indexes `deferred` are answered
    after that.
    """

    __slots__ = (
        "calls",
        "on_done",
        "final_indexes",
        "instance_free",
        "deferred",
        "number",
        "on_released",
        "report",
    )

    def __init__(
        self,
        calls: Sequence[Call],
        on_released: Callable[[], None],
        on_done: Callable[[ExecutionTimes | None], None],
        report: Callable[[Batch, ExecutionTimes], None],
    ) -> None:
        self.calls = calls
        self.on_released = on_released
        self.on_done = on_done
        self.report = report
        self.number = 0
        self.instance_free = False  # the instance no longer works on it
        self.deferred: Sequence[int] = ()
        self.final_indexes: list[int] = []  # the indexes that the stub has answered for good

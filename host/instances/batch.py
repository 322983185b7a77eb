"""Calls that run together, and the times of their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host.inference.call import Call
from host.inference.request import ExecutionTimes


class Batch:
    """Calls that run together.

    `on_done`: called at the end, with the batch and its times, or None if the stub died.
    `on_released`: called once the instance can take the next batch, unless its stub dies first.
    `report`: counts the batch; may be called after the responses. `deferred`: indexes of calls
    that are answered later. `on_returned`: called if the stub returns a prefetched call without
    running it; None if the call was not sent to be returned.
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
        "on_returned",
    )

    def __init__(
        self,
        calls: Sequence[Call],
        on_released: Callable[[], None],
        on_done: Callable[[Batch, ExecutionTimes | None], None],
        report: Callable[[Batch, ExecutionTimes], None],
        on_returned: Callable[[Call], None] | None = None,
    ) -> None:
        self.calls = calls
        self.on_released = on_released
        self.on_done = on_done
        self.report = report
        self.on_returned = on_returned
        self.number = 0
        self.instance_free = False  # the instance no longer works on it
        self.deferred: Sequence[int] = ()
        self.final_indexes: list[int] = []  # indexes of calls with a final response

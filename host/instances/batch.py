"""Calls that run together, and the times of their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from host.inference.call import Call
from host.inference.request import ExecutionTimes


class Batch(msgspec.Struct, eq=False):
    """Calls that run together.

    `on_released`: called if the instance can take the next batch before the end of this one.
    `on_done`: called at the end, with the batch and its times, None if it has none; and whether the
    instance can take the next batch from now on.
    `report`: counts the batch, after its responses. `on_returned`: called if the stub returns a
    prefetched call without running it; None if the call was not sent to be returned.
    """

    calls: Sequence[Call]
    on_released: Callable[[], None]
    on_done: Callable[[Batch, ExecutionTimes | None, bool], None]
    report: Callable[[Batch, ExecutionTimes], None]
    on_returned: Callable[[Call], None] | None = None
    number: int = 0
    instance_free: bool = False
    """Whether the instance no longer works on it."""
    answered: set[int] = msgspec.field(default_factory=set)
    """Indexes of calls with a final response."""
    deferred: Sequence[int] = ()
    """Indexes of calls that are answered after the end."""
    rescheduled: Sequence[int] = ()
    """Indexes of calls that the model wants to get again."""
    again: Sequence[int] = ()
    """Those of them that it will get again."""
    times: ExecutionTimes | None = None
    """Set at the end; None if all callers had gone before the batch started."""

"""When blocks are released to the process that has them, and the error if there is no room for one.

Frontend processes need this, too, so it does not import the connection to stubs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from host.errors import HostError, internal
from stub.wire.arena import ArenaFull


class ReleaseTimer:
    """Calls `flush` soon in the event loop, from whichever thread dropped the last reference.

    Not at once: the next batch usually comes first and carries the releases.
    """

    _DELAY = 0.02

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._scheduled = False
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def schedule(self) -> None:
        """Schedules `flush`."""
        if self._scheduled or self._loop.is_closed():
            return
        self._scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_later(self._DELAY, self._run)
        else:
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self._flush()


def arena_full_error(full: ArenaFull) -> HostError:
    """The error with its documented text and advice.

    Source: docs/reference/model-api.md, "Options and shared memory".
    """
    return internal(
        "Failed to increase the shared memory pool size for key 'pbhost-host' to"
        f" {full.used + full.requested} bytes. Error: {full};"
        " raise --arena-byte-size or send smaller tensors"
    )

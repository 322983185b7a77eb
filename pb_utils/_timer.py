"""Calls that are due at a time: one thread makes them all, started with the first one."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable

_LONGEST_WAIT = 3600.0  # a condition takes no endless time


class TimerHandle:
    """A call that is due at a time."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        """Be made by a timer only."""
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Make the call no more. Finalisers may do this: it takes no lock."""
        self._call = None

    def run(self) -> None:
        """Make the call unless it was stopped."""
        call, self._call = self._call, None
        if call is not None:
            call()

    def is_done(self) -> bool:
        """Return whether the call was made or stopped."""
        return self._call is None


class Timer:
    """A thread and what it has to do when."""

    def __init__(self) -> None:
        """Begin without a thread."""
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, TimerHandle]] = []
        self._numbers = itertools.count()
        self._clear_at = 64
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, call: Callable[[], None]) -> TimerHandle:
        """Make a call in so many seconds, on the timer's thread, where it must not wait."""
        handle = TimerHandle(call)
        with self._changed:
            if len(self._due) >= self._clear_at:
                self._due = [entry for entry in self._due if not entry[2].is_done()]
                heapq.heapify(self._due)
                self._clear_at = 64 + 2 * len(self._due)
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), handle))
            if self._due[0][2] is handle:
                self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pbhost-timer", daemon=True)
                self._thread.start()
        return handle

    def __len__(self) -> int:
        """Return how many calls are kept, those that were stopped and not yet cleared included."""
        return len(self._due)

    def _run(self) -> None:
        while True:
            self._wait_for_next().run()

    def _wait_for_next(self) -> TimerHandle:
        """Wait for the next call that is due."""
        with self._changed:
            while True:
                wait = self._due[0][0] - time.monotonic() if self._due else _LONGEST_WAIT
                if wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(min(wait, _LONGEST_WAIT))


_timer = Timer()


def call_later(seconds: float, call: Callable[[], None]) -> TimerHandle:
    """Make a call in so many seconds, on the one thread for that, where it must not wait."""
    return _timer.call_later(seconds, call)


def _reset_after_fork() -> None:
    """Forget the thread, which a forked child does not have, and its lock."""
    global _timer
    _timer = Timer()


os.register_at_fork(after_in_child=_reset_after_fork)

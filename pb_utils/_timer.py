"""A timer: one thread runs all callbacks at their times. It starts with the first callback."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable

_MAX_WAIT = 3600.0  # seconds; Condition.wait does not accept every larger value


class TimerHandle:
    """A callback that is scheduled at a timer."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        """Creates the handle; ``Timer.call_later`` does this."""
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Cancels the callback. A finaliser may call this, because it takes no lock."""
        self._callback = None

    def run(self) -> None:
        """Runs the callback, unless it was cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def is_done(self) -> bool:
        """Returns whether the callback has run or was cancelled."""
        return self._callback is None


class Timer:
    """A thread that runs callbacks at their times."""

    def __init__(self) -> None:
        """Creates a timer; its thread starts with the first callback."""
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, TimerHandle]] = []
        self._ids = itertools.count()
        self._cleanup_threshold = 64
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> TimerHandle:
        """Runs a callback after a time, on the timer's thread.

        Args:
            seconds: the time in seconds.
            callback: the function; it must not block.

        Returns:
            A handle that can cancel the callback.
        """
        handle = TimerHandle(callback)
        with self._changed:
            if len(self._due) >= self._cleanup_threshold:
                self._due = [entry for entry in self._due if not entry[2].is_done()]
                heapq.heapify(self._due)
                self._cleanup_threshold = 64 + 2 * len(self._due)
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._ids), handle))
            if self._due[0][2] is handle:
                self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pbhost-timer", daemon=True)
                self._thread.start()
        return handle

    def __len__(self) -> int:
        """Returns the number of scheduled callbacks, with cancelled ones not yet removed."""
        return len(self._due)

    def _run(self) -> None:
        while True:
            self._wait_for_next().run()

    def _wait_for_next(self) -> TimerHandle:
        """Waits until the next callback is due, and returns its handle."""
        with self._changed:
            while True:
                wait = self._due[0][0] - time.monotonic() if self._due else _MAX_WAIT
                if wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(min(wait, _MAX_WAIT))


_timer = Timer()


def call_later(seconds: float, callback: Callable[[], None]) -> TimerHandle:
    """Runs a callback after a time, on the timer thread of the process. It must not block."""
    return _timer.call_later(seconds, callback)


def _reset_after_fork() -> None:
    """Starts afresh in a forked child, which has no timer thread and may have a held lock."""
    global _timer
    _timer = Timer()


os.register_at_fork(after_in_child=_reset_after_fork)

"""Measures how long work waits for the event loop, and logs what holds the loop up."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback

_log = logging.getLogger("pbhost")

_PERIOD = 0.1  # seconds between two measurements
_LIMIT = 1.0  # seconds; a longer turn of the loop is logged with its stack
_REPORT_PERIOD = 60.0  # seconds between two such reports
_WINDOW = 15.0  # seconds


class EventLoopWatchdog:
    """Asks the loop it was made in, from a thread, to run a callback ten times per second."""

    def __init__(self, limit: float = _LIMIT) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._longest = 0.0  # of this window
        self._longest_before = 0.0  # of the window before
        self._window_started = time.monotonic()
        self._reported_at = float("-inf")
        self._ran = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._measure, name="pbhost-event-loop-watchdog", daemon=True
        )
        self._thread.start()

    def lag(self) -> float:
        """The longest time in seconds that a callback waited, in the last 15 to 30 seconds."""
        self._start_window()
        return max(self._longest, self._longest_before)

    def close(self) -> None:
        """Stops measuring."""
        self._closing.set()
        self._ran.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._closing.wait(_PERIOD):
            self._ran.clear()
            try:
                self._loop.call_soon_threadsafe(self._record_lag, time.monotonic())
            except RuntimeError:
                return  # the loop is closed
            if not self._ran.wait(self._limit):
                self._report()
                self._ran.wait()

    def _record_lag(self, asked_at: float) -> None:
        self._start_window()
        self._longest = max(self._longest, time.monotonic() - asked_at)
        self._ran.set()

    def _start_window(self) -> None:
        windows = (time.monotonic() - self._window_started) // _WINDOW
        if windows:
            self._longest_before = self._longest if windows == 1 else 0.0
            self._longest = 0.0
            self._window_started = time.monotonic()

    def _report(self) -> None:
        """Logs what the thread of the loop does now."""
        now = time.monotonic()
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None or now < self._reported_at + _REPORT_PERIOD:
            return
        self._reported_at = now
        _log.warning(
            "The event loop has not run for %g seconds, so that all clients wait. It is at:\n%s",
            self._limit,
            "".join(traceback.format_stack(frame)).rstrip(),
        )

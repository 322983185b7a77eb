"""The times at which requests are due in open loop, and a timer with the precision for them."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterator

_CLOCK = time.CLOCK_MONOTONIC  # that of time.perf_counter
_ABSOLUTE = 1


def arrival_times(start: float, rate: float, poisson: bool, seed: int) -> Iterator[float]:
    """Yields the times of requests with this rate: equally spaced, or a Poisson process.

    The times do not depend on responses, so that a server that stalls is charged for all requests
    that it keeps waiting.
    """
    if not poisson:
        number = 0
        while True:
            yield start + number / rate
            number += 1
    pause = random.Random(seed).expovariate
    due = start
    while True:
        due += pause(rate)
        yield due


class _Spec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Timer:
    """A timer of the kernel as a file descriptor. Those of event loops have only milliseconds."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._libc.timerfd_create(_CLOCK, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, due: float) -> None:
        """Makes the descriptor readable at this time of `time.perf_counter`."""
        seconds = max(due, 1e-9)  # 0 would stop the timer
        spec = _Spec(0, 0, int(seconds), int(seconds % 1 * 1e9))
        self._libc.timerfd_settime(self.descriptor, _ABSOLUTE, ctypes.byref(spec), None)

    def acknowledge(self) -> None:
        """Makes the descriptor unreadable until the time that is set next."""
        try:
            os.read(self.descriptor, 8)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.descriptor)

"""Writes the log to a file descriptor without ever making the event loop wait for it."""

from __future__ import annotations

import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MAX_QUEUED_BYTES = 8 << 20
"""Bytes of lines that wait for a console or disk; further lines are dropped."""

_PIPE_PAGE = 4096  # bytes that a pipe with room takes at once


class LogWriter:
    """Writes lines to a descriptor, which it does not close.

    A pipe takes most lines at once. Lines that it has no room for, and all lines for files and
    terminals, are written by a thread; their number of bytes is limited.

    Args:
        descriptor: Where to write.
        on_error: Called with the first OSError of the thread, on the thread.
        on_dropped: Called with a number of dropped lines when the others are written, on the
            thread; returns a line about that.
    """

    def __init__(
        self,
        descriptor: int,
        on_error: Callable[[OSError], None],
        on_dropped: Callable[[int], bytes],
    ) -> None:
        self._descriptor = descriptor
        self._on_error = on_error
        self._on_dropped = on_dropped
        self._always_queues = not _tells_room(descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._changed = threading.Condition()
        self._queue: deque[memoryview] = deque()
        self._queued = 0  # bytes, including those that the thread is writing
        self._dropped = 0  # lines
        self._closing = False
        self._thread: threading.Thread | None = None
        self._start_thread()

    def write(self, line: bytes) -> None:
        """Writes or queues a line, or drops it if too much is queued. Never waits.

        Raises OSError if the line cannot be written; nothing is raised for queued lines.
        """
        with self._changed:
            rest = memoryview(line)
            if not self._queued and not self._always_queues:
                rest = self._write_at_once(rest)
            if not rest:
                return
            if self._closing or self._queued + len(rest) > MAX_QUEUED_BYTES:
                self._dropped += 1
                return
            self._queue.append(rest)
            self._queued += len(rest)
            self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """Starts the thread, unless it runs; at the limit of threads, the next line tries again."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_queued, name="pbhost-log", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def close(self, seconds: float) -> bool:
        """Waits at most `seconds` until everything is written; returns whether it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._start_thread()
        if self._thread is None:
            return not self._queued
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write_at_once(self, data: memoryview) -> memoryview:
        """Writes what the descriptor takes without waiting; returns the rest."""
        while data and self._poll.poll(0):
            data = data[os.write(self._descriptor, data[:_PIPE_PAGE]) :]
        return data

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                data = self._queue.popleft()
            self._write_all(data)
            with self._changed:
                self._queued -= len(data)
                dropped = 0
                if not self._queue:
                    dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write_all(memoryview(self._on_dropped(dropped)))

    def _write_all(self, data: memoryview) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._on_error(error)


def write_if_room(descriptor: int, line: bytes) -> None:
    """Writes a short line, unless that would wait or fail."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    with suppress(OSError):
        if poll.poll(0):
            os.write(descriptor, line)


def _tells_room(descriptor: int) -> bool:
    """Whether the kernel knows if a write would wait: not of a file or terminal."""
    return not (stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor))

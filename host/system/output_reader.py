"""Reads what processes print, line by line."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

_READ_BYTES = 2048  # bytes that are handled before the event loop continues
_MAX_LINE = 1 << 16  # bytes of output without a newline that are kept


class OutputHandler(Protocol):
    """Called with a line that a stub printed, and whether it went to stderr."""

    def __call__(self, line: str, error: bool) -> None: ...


class OutputReader:
    """Reads lines from one pipe. `closed` is done at its end, when no process can write any more.

    No transport of the event loop does that: uvloop closes the descriptor of its pipe twice, and a
    thread that has opened another one in between loses it.
    """

    def __init__(self, fd: int, error: bool, handler: OutputHandler) -> None:
        self._fd = fd
        self._error = error
        self._handler = handler
        self._partial_line = b""
        self._open = True
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self.read)

    def read(self) -> bool:
        """Handles the next few lines; returns whether there may be more."""
        if not self._open:
            return False
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        lines = (self._partial_line + data).split(b"\n")
        self._partial_line = lines.pop()
        if len(self._partial_line) > _MAX_LINE:
            lines.append(self._partial_line)
            self._partial_line = b""
        for line in lines:
            self._handler(line.decode(errors="replace"), self._error)
        if not data:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Handles the last, unfinished line and stops reading."""
        if not self._open:
            return
        self._open = False
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.closed.set_result(None)
        if self._partial_line:
            self._handler(self._partial_line.decode(errors="replace"), self._error)
            self._partial_line = b""

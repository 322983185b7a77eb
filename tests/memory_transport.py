"""A transport that keeps what a connection writes, for tests that hand it bytes themselves."""

from __future__ import annotations

import asyncio
from typing import Any


class MemoryTransport(asyncio.Transport):
    """It takes all that is written, at once, until it is closed. `extra` is what it says of itself.

    Writing after the end is an error, where a transport of asyncio would say nothing.
    """

    def __init__(self, **extra: object) -> None:
        super().__init__(extra)
        self.data = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed, "written after the end"
        self.data += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is room for all."""

    def pause_reading(self) -> None:
        """Does nothing: the test decides how many bytes it passes on."""

    def resume_reading(self) -> None:
        """As above."""

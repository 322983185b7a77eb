"""Limits the memory of requests that are being received or wait for a model.

Without a limit, a few clients with large requests could make the kernel kill the server.
"""

from __future__ import annotations

from host.errors import ErrorCode, HostError

SMALL_BYTES = 65536
"""A request up to this size may also use an eighth more than the limit.

So large requests do not make the server refuse small ones.
"""

_UNLIMITED = 1 << 62  # bytes


class OutOfReceiveMemory(HostError):
    """There is no memory for a request: RESOURCE_EXHAUSTED in gRPC, status 503 in HTTP."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class ReceiveBudget:
    """Counts the bytes of the requests of all connections. Belongs to the event loop.

    Attributes:
        limit: Maximum number of bytes (`--receive-buffer-byte-size`).
        reserved_bytes: The bytes that all requests hold now.
    """

    __slots__ = ("limit", "reserved_bytes")

    def __init__(self, limit: int = _UNLIMITED) -> None:
        self.limit = limit
        self.reserved_bytes = 0

    def has_room(self, size: int, needed: int) -> bool:
        """Whether a request of `needed` bytes may reserve `size` bytes more."""
        limit = self.limit if needed > SMALL_BYTES else self.limit + self.limit // 8
        return self.total_bytes() + size <= limit

    def reserve(self, size: int) -> None:
        """Counts more bytes; fewer, if `size` is negative."""
        self.reserved_bytes += size

    def total_bytes(self) -> int:
        """The bytes that count against the limit."""
        return self.reserved_bytes


class ReservedBytes:
    """The bytes that one request has reserved. They are released when the object is deleted.

    Attributes:
        size: The number of bytes.
    """

    __slots__ = ("size", "_budget")

    def __init__(self, budget: ReceiveBudget, size: int = 0) -> None:
        """Reserves `size` bytes. Raises OutOfReceiveMemory."""
        self.size = 0
        self._budget = budget
        if size:
            self.add(size)

    def __del__(self) -> None:
        self.release()

    def check_room(self, needed: int) -> None:
        """Raises OutOfReceiveMemory if the request cannot have `needed` bytes in all now."""
        if not self._budget.has_room(needed - self.size, needed):
            raise self._error(needed)

    def add(self, size: int, needed: int = 0) -> None:
        """Reserves more bytes. `needed` is the size of the whole request, if it is known.

        Raises OutOfReceiveMemory.
        """
        needed = max(needed, self.size + size)
        if not self._budget.has_room(size, needed):
            raise self._error(needed)
        self._budget.reserve(size)
        self.size += size

    def subtract(self, size: int) -> None:
        """Releases some of the bytes."""
        self._budget.reserve(-size)
        self.size -= size

    def release(self) -> None:
        """Releases all bytes. A second call does nothing."""
        self.subtract(self.size)

    def _error(self, needed: int) -> OutOfReceiveMemory:
        limit = self._budget.limit
        others = self._budget.total_bytes() - self.size
        advice = "Send less" if needed > limit else "Send it again later"
        return OutOfReceiveMemory(
            f"Not enough memory to receive the request: it needs {needed} bytes, and other requests"
            f" hold {others} of {limit} bytes. {advice}, or raise --receive-buffer-byte-size"
        )

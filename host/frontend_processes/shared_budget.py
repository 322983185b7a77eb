"""One limit on the memory of received requests, for all processes that receive them."""

from __future__ import annotations

import os

from host.frontends.receive_memory import ReceiveBudget
from stub.wire.shared_file import Mapping, create_shared_file

_WORD = 8  # bytes


class BudgetFile:
    """Shared memory with a number for each process: the bytes that it has reserved.

    Raises OSError.
    """

    def __init__(self, processes: int) -> None:
        self.size = processes * _WORD
        self.fd = create_shared_file("pbhost-receive-budget", self.size)
        self._words = Mapping(self.fd, self.size, writable=True).view.cast("Q")

    def clear(self, index: int) -> None:
        """Releases what a process has reserved that has ended."""
        self._words[index] = 0

    def close(self) -> None:
        """Closes the descriptor of this process."""
        os.close(self.fd)


class SharedReceiveBudget(ReceiveBudget):
    """Counts the bytes of one process, and checks the sum of all against the limit.

    Each process writes its own number only. Two that reserve at the same moment may together
    exceed the limit by their last requests.
    """

    __slots__ = ("_index", "_words")

    def __init__(self, limit: int, fd: int, size: int, index: int) -> None:
        """`fd`, `size`: of a `BudgetFile`. `index`: the number of this process in it."""
        super().__init__(limit)
        self._words = Mapping(fd, size, writable=True).view.cast("Q")
        self._index = index

    def reserve(self, size: int) -> None:
        """As `ReceiveBudget.reserve`."""
        super().reserve(size)
        self._words[self._index] = self.reserved_bytes

    def total_bytes(self) -> int:
        """The bytes that the requests of all processes hold now."""
        return sum(self._words)

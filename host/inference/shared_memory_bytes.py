"""Bytes of tensors in client-registered shared memory, which must be copied before use.

The client may change them or shrink its memory, and a process that touches memory that is gone is
killed by SIGBUS. So they are objects that no library can use as a buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from host.errors import invalid_argument

CHUNK_SIZE = 1 << 28
"""Maximum number of bytes copied at a time where not all are needed at once.

A client's memory can be larger than the machine's if it is sparse.
"""


class SharedMemoryBytes(ABC):
    """`bytes(self)` is a private copy; raises HostError INTERNAL if the memory is gone."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __bytes__(self) -> bytes: ...

    @abstractmethod
    def read_part(self, begin: int, size: int) -> bytes:
        """Copies a part, which must lie within. Raises HostError INTERNAL."""


def read_bytes(data: bytes | memoryview | SharedMemoryBytes) -> bytes | memoryview:
    """The bytes to read: a copy if they are in memory of a client. Raises HostError INTERNAL."""
    return data if isinstance(data, (bytes, memoryview)) else bytes(data)


def refuse_if_too_large(name: str, data: SharedMemoryBytes) -> None:
    """Raises HostError INVALID_ARG if the machine lacks memory for two copies of a tensor.

    One is the copy, the other lies in an arena. Linux would grant the memory and kill this process
    later.
    """
    size = len(data)
    if size > CHUNK_SIZE and 2 * size > _available():
        raise invalid_argument(
            f"tensor '{name}' has {size} bytes in shared memory, which have to be copied, and there"
            " is not enough memory for that"
        )


def _available() -> int:
    with open("/proc/meminfo", "rb") as report:
        (line,) = (line for line in report if line.startswith(b"MemAvailable:"))
    return 1024 * int(line.split()[1])

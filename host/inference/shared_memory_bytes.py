"""Bytes of tensors that lie in memory which a client has registered: known by length, and copied.

The client may change them, or make its memory smaller, and a process that touches memory which is
gone is ended by SIGBUS. So the host has them as objects that no library takes for a buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from host.errors import invalid_argument

CHUNK_SIZE = 1 << 28
"""The most bytes that are copied at a time by who does not need all at once. A client's memory can
be larger than the machine's, as long as nothing is written there.
"""


class SharedMemoryBytes(ABC):
    """`bytes` of it are a private copy, which raises HostError INTERNAL if they are gone."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __bytes__(self) -> bytes: ...

    @abstractmethod
    def read_part(self, begin: int, size: int) -> bytes:
        """The same of some of them, which must lie within."""


def read_bytes(data: bytes | memoryview | SharedMemoryBytes) -> bytes | memoryview:
    """The bytes to look at: a copy of those in a client's memory. Raises HostError INTERNAL."""
    return data if isinstance(data, (bytes, memoryview)) else bytes(data)


def refuse_if_too_large(name: str, data: SharedMemoryBytes) -> None:
    """Raise HostError INVALID_ARG if the machine has no memory for a copy of a tensor's bytes, and
    for one more in an arena. Linux would promise it in any case, and end this process later.
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

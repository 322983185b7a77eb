"""Bytes of tensors that lie in memory which a client has registered: known by length, and copied.

The client may change them, or make its memory smaller, and a process that touches memory which is
gone is ended by SIGBUS. So the host has them as objects that no library takes for a buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class ClientBytes(ABC):
    """`bytes` of it are a private copy, which raises HostError INTERNAL if they are gone."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __bytes__(self) -> bytes: ...


def contents(data: bytes | memoryview | ClientBytes) -> bytes | memoryview:
    """The bytes to look at: a copy of those in a client's memory. Raises HostError INTERNAL."""
    return data if isinstance(data, (bytes, memoryview)) else bytes(data)

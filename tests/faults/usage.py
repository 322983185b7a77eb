"""What a host and its processes hold: memory, descriptors, processes, files in shared memory."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import RunningHost

MEMORY_SLACK = 64 << 20
"""Bytes that the allocators of host and stubs may keep of what a fault made them take."""
DESCRIPTOR_SLACK = 8
"""Descriptors that the host may open for good at the first use of a feature."""


@dataclass(frozen=True)
class Usage:
    """What a host holds at one moment. Memory is the resident memory of the host in bytes."""

    memory: int
    descriptors: int
    processes: Counter[str]
    shared: frozenset[str]

    @classmethod
    def of(cls, host: RunningHost) -> Usage:
        """The usage now."""
        process = psutil.Process(host.process.pid)
        names: Counter[str] = Counter()
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                names[" ".join(child.cmdline()).strip() or child.name()] += 1
        shared = frozenset(str(path) for path in Path("/dev/shm").glob(f"*pbhost*{process.pid}*"))
        return cls(process.memory_info().rss, process.num_fds(), names, shared)

    def beyond(self, before: Usage) -> list[str]:
        """What is held now, beyond the slack, and was not held before; a line for each."""
        found = []
        if self.memory > before.memory + MEMORY_SLACK:
            found.append(f"{(self.memory - before.memory) >> 20} MiB of memory")
        if self.descriptors > before.descriptors + DESCRIPTOR_SLACK:
            found.append(f"{self.descriptors - before.descriptors} descriptors")
        more = self.processes - before.processes
        found += [f"{count} processes {name!r}" for name, count in more.items()]
        missing = before.processes - self.processes
        found += [f"no process {name!r} any more" for name in missing]
        found += sorted(self.shared - before.shared)
        return found

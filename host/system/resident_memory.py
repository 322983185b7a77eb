"""Measures the memory of processes."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, with pages that it shares; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # it has ended, or /proc is not mounted
        return 0


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process; a page that n processes share counts one n-th (PSS).

    Where the kernel does not tell it, as `resident_bytes`. 0 if there is no such process. Blocks
    for milliseconds if the process is large.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except ProcessLookupError:  # it has ended, but its parent has not noticed yet
        return 0
    except OSError:  # it has ended, or the kernel is older than 4.14
        pass
    return resident_bytes(pid)


def processes_of_groups(leaders: Collection[int]) -> dict[int, list[int]]:
    """The processes in the groups that these processes lead, by leader. Blocks."""
    found: dict[int, list[int]] = {leader: [] for leader in leaders}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(ProcessLookupError):
                group = os.getpgid(int(name))
                if group in found:
                    found[group].append(int(name))
    return found

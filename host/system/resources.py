"""The CPUs and the memory that processes may use and do use, and sizes in bytes as text.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_GROUP, _CPU_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cpus(group: Path = _GROUP, mount: Path = _CPU_MOUNT) -> float:
    """The number of CPUs: those that the process is bound to, or the limit of its control group.

    `group`: the file that names the control group (cgroups(7)). `mount`: where control groups are
    mounted. What cannot be read there is no limit.
    """
    return min([float(len(os.sched_getaffinity(0))), *_cgroup_limits(group, mount)])


def _cgroup_limits(group: Path, mount: Path) -> Iterator[float]:
    try:
        lines = group.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":  # version 2
            at = mount
        elif "cpu" in controllers.split(","):
            at = mount / "cpu"
        else:
            continue
        own = at / path.lstrip("/")
        # A container may see only its own group, as the outermost one.
        for folder in {at, own, *(above for above in own.parents if at in above.parents)}:
            try:
                yield _cgroup_limit(folder)
            except (OSError, ValueError, ZeroDivisionError):
                continue


def _cgroup_limit(folder: Path) -> float:
    """The limit of one group. Raises OSError or ValueError if it has none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()  # "max" is none
    except FileNotFoundError:
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
    if int(quota) < 0:
        raise ValueError("no limit")
    return int(quota) / int(period)


MAX_BYTES = 2**63 - 1
_MAX_DIGITS = 40
"""Longer numbers are out of bound, and Python refuses to convert very long ones."""

_SIZE = re.compile(r"([0-9]+)(?:([kKMGT])(i?))?")
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


class SizeOutOfBound(ValueError):
    """The text is a size, but of more than `MAX_BYTES`."""


def read_byte_size(text: str) -> int:
    """Returns the size in bytes: K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Raises SizeOutOfBound for more than `MAX_BYTES`, ValueError for other texts.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("a size in bytes is a number, perhaps with K, M, G, T, Ki, Mi, Gi or Ti")
    number, letter, binary = found.groups()
    unit = int((1024 if binary else 1000) ** _POWERS[letter]) if letter else 1
    size = int(number) * unit if len(number) <= _MAX_DIGITS else MAX_BYTES + 1
    if size > MAX_BYTES:
        raise SizeOutOfBound(f"a size in bytes is at most {MAX_BYTES}")
    return size


def format_bytes(size: int) -> str:
    """A size in bytes as a short text, such as 1.5G; the units are powers of 1024."""
    amount, units = float(size), list("BKMGT")
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        del units[0]
    return f"{amount:.{1 if amount < 10 and units[0] != 'B' else 0}f}{units[0]}"


_PROC, _MEMORY_MOUNT = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # bytes; version 1 shows a number near 2**63 if there is no limit


class MemoryGroup:
    """The control group of this process for memory, of version 1 or 2; maybe none.

    Args:
        proc: Where the kernel shows processes.
        mount: Where control groups are mounted.
    """

    def __init__(self, proc: Path = _PROC, mount: Path = _MEMORY_MOUNT) -> None:
        self._vmstat = proc / "vmstat"
        self._is_version_2 = (mount / "cgroup.controllers").exists()
        self._root = mount if self._is_version_2 else mount / "memory"
        folder = self._root / _path_in(proc / "self" / "cgroup", self._is_version_2)
        # In a container, the group of the process may be what is mounted.
        self._folder = folder if folder.is_dir() else self._root
        self._kills = self._count_group_kills()
        self._machine_kills = self._count_machine_kills()

    def limit(self) -> int | None:
        """Bytes that the group and the groups around it allow; None without a limit."""
        name = "memory.max" if self._is_version_2 else "memory.limit_in_bytes"
        folders = [self._folder, *self._folder.parents]
        limits = [
            _read_number(folder / name)
            for folder in folders[: folders.index(self._root) + 1]
            if (folder / name).exists()
        ]
        allowed = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
        return min(allowed, default=None)

    def take_kill(self) -> str:
        """Returns why the kernel has killed a process since the last call, "" if it has not.

        Call it once for each process that has ended by SIGKILL.
        """
        if self._count_group_kills() > self._kills:
            self._kills += 1
            self._machine_kills += 1  # it counts these as well
            return f"the memory of the control group ran out{self._describe_use()}"
        if self._count_machine_kills() > self._machine_kills:
            self._machine_kills += 1
            return "the memory of the machine ran out"
        return ""

    def _describe_use(self) -> str:
        name = "memory.peak" if self._is_version_2 else "memory.max_usage_in_bytes"
        used, allowed = _read_number(self._folder / name), self.limit()
        if allowed is None:
            return ""
        allows = f"{allowed >> 20} MiB allowed"
        return f": {allows}" if used is None else f": at most {used >> 20} MiB used, {allows}"

    def _count_group_kills(self) -> int:
        name = "memory.events" if self._is_version_2 else "memory.oom_control"
        return _read_field(self._folder / name, "oom_kill")

    def _count_machine_kills(self) -> int:
        return _read_field(self._vmstat, "oom_kill")


def _path_in(file: Path, is_version_2: bool) -> str:
    """The path of the group in /proc/self/cgroup, without its slash; "" if it is not there."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if (is_version_2 and not controllers) or "memory" in controllers.split(","):
            return path.lstrip("/")
    return ""


def _read_number(file: Path) -> int | None:
    """A number, None for `max` or a file that cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _read_field(file: Path, name: str) -> int:
    """A number behind its name on a line; 0 if it cannot be read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


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

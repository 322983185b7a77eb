"""The number of CPUs that this process and its children may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
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

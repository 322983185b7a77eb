"""The CPUs and the memory that processes may use and do use, and sizes in bytes as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from host.system.resources import MemoryGroup, usable_cpus

BOUND = 8


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(BOUND)))


def counted(folder: Path, group: str, files: Mapping[str, str]) -> float:
    told = folder / "cgroup"
    told.write_text(group)
    mount = folder / "mount"
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    return usable_cpus(told, mount)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, BOUND),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, BOUND),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/gone\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/../../x\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {}, BOUND),
        ("0::/\n", {"cpu.max": "nonsense"}, BOUND),
        ("0::/\n", {"cpu.max": "1 0"}, BOUND),
        (
            "5:cpu,cpuacct:/docker/1\n1:memory:/docker/1\n",
            {"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            0.25,
        ),
        (
            "5:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            BOUND,
        ),
    ],
)
def test_a_limit_of_the_group_or_one_above_counts(
    tmp_path: Path, group: str, files: Mapping[str, str], expected: float
) -> None:
    assert counted(tmp_path, group, files) == expected


def test_without_control_groups_the_cores_it_is_bound_to_count(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "none", tmp_path) == BOUND


MIB = 1 << 20


class Kernel:
    """What the kernel shows of a process, below a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        self.write(self.proc / "vmstat", "nr_free_pages 1\noom_kill 3\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self) -> MemoryGroup:
        return MemoryGroup(self.proc, self.mount)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def version_2(kernel: Kernel, path: str = "/pods/a") -> Path:
    kernel.write(kernel.mount / "cgroup.controllers", "cpu memory\n")
    kernel.write(kernel.proc / "self" / "cgroup", f"0::{path}\n")
    folder = kernel.mount / path.lstrip("/")
    kernel.write(folder / "memory.max", "max\n")
    kernel.write(folder / "memory.peak", f"{511 * MIB}\n")
    kernel.write(folder / "memory.events", "low 0\noom 1\noom_kill 0\n")
    return folder


def version_1(kernel: Kernel, path: str = "/pods/a") -> Path:
    kernel.write(kernel.proc / "self" / "cgroup", f"5:cpu,cpuacct:/\n4:memory:{path}\n0::/\n")
    folder = kernel.mount / "memory" / path.lstrip("/")
    kernel.write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    kernel.write(folder / "memory.max_usage_in_bytes", f"{512 * MIB}\n")
    kernel.write(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    return folder


def test_the_smallest_limit_of_the_groups_around_counts(kernel: Kernel) -> None:
    folder = version_2(kernel)
    assert kernel.group().limit() is None
    kernel.write(folder.parent / "memory.max", f"{700 * MIB}\n")
    assert kernel.group().limit() == 700 * MIB
    kernel.write(folder / "memory.max", f"{512 * MIB}\n")
    assert kernel.group().limit() == 512 * MIB


def test_version_1_shows_a_huge_number_without_a_limit(kernel: Kernel) -> None:
    folder = version_1(kernel)
    assert kernel.group().limit() is None
    kernel.write(folder / "memory.limit_in_bytes", f"{256 * MIB}\n")
    assert kernel.group().limit() == 256 * MIB


def test_the_group_of_a_container_may_be_the_mounted_one(kernel: Kernel) -> None:
    version_1(kernel)
    kernel.write(kernel.mount / "memory" / "memory.limit_in_bytes", f"{256 * MIB}\n")
    kernel.write(kernel.proc / "self" / "cgroup", "4:memory:/docker/not/visible\n")
    assert kernel.group().limit() == 256 * MIB


def test_a_machine_without_control_groups_has_no_limit(kernel: Kernel) -> None:
    assert kernel.group().limit() is None
    assert kernel.group().take_kill() == ""


def test_each_kill_of_the_group_explains_one_death(kernel: Kernel) -> None:
    folder = version_2(kernel)
    kernel.write(folder / "memory.max", f"{512 * MIB}\n")
    group = kernel.group()
    assert group.take_kill() == ""
    kernel.write(folder / "memory.events", "oom 1\noom_kill 2\n")
    kernel.write(kernel.proc / "vmstat", "oom_kill 5\n")
    why = "the memory of the control group ran out: at most 511 MiB used, 512 MiB allowed"
    assert [group.take_kill() for _ in range(3)] == [why, why, ""]


def test_version_1_counts_kills_too(kernel: Kernel) -> None:
    folder = version_1(kernel)
    kernel.write(folder / "memory.limit_in_bytes", f"{512 * MIB}\n")
    group = kernel.group()
    kernel.write(folder / "memory.oom_control", "under_oom 0\noom_kill 1\n")
    assert group.take_kill() == (
        "the memory of the control group ran out: at most 512 MiB used, 512 MiB allowed"
    )


def test_a_kill_outside_of_the_group_is_the_machines(kernel: Kernel) -> None:
    version_2(kernel)
    group = kernel.group()
    kernel.write(kernel.proc / "vmstat", "nr_free_pages 1\noom_kill 4\n")
    assert [group.take_kill(), group.take_kill()] == ["the memory of the machine ran out", ""]

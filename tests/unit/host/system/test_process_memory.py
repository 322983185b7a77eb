"""Sizes in bytes as text, and the memory of processes and of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.system.process_memory import MemoryGroup

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

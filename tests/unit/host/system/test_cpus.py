"""How much of the processors this process may use, as control groups say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from host.system.cpus import usable_cpus

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

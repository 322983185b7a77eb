"""Gauges of the machine, from files in the format of /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.metrics.families import MetricsSnapshot
from host.metrics.machine import MachineMetrics

MEMORY = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> MachineMetrics:
    (tmp_path / "meminfo").write_text(MEMORY)
    return MachineMetrics(tmp_path / "stat", tmp_path / "meminfo")


def shown(machine: MachineMetrics) -> dict[str, float]:
    machine.sample()
    snapshot = MetricsSnapshot()
    machine.collect_into(snapshot)
    return {family.name: family.samples[0].value for family in snapshot.families()}


def test_utilization_is_measured_since_the_last_poll(
    machine: MachineMetrics, tmp_path: Path
) -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice
    (tmp_path / "stat").write_text("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1 1 1 1\n")
    assert shown(machine)["nv_cpu_utilization"] == pytest.approx(0.2)
    (tmp_path / "stat").write_text("cpu  20 5 20 80 20 5 5 5 9 9\n")
    assert shown(machine)["nv_cpu_utilization"] == pytest.approx(40 / 60)


def test_utilization_is_zero_if_no_time_has_passed(machine: MachineMetrics, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 0 10 70 10 0 0 0\n")
    shown(machine)
    assert shown(machine)["nv_cpu_utilization"] == 0


def test_memory_is_in_bytes(machine: MachineMetrics, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 0 10 70 10 0 0 0\n")
    values = shown(machine)
    assert values["nv_cpu_memory_total_bytes"] == 1000 * 1024
    assert values["nv_cpu_memory_used_bytes"] == 600 * 1024


@pytest.mark.parametrize("stat", [None, "", "cpu a b\n", "cpu 1 2\n"])
def test_gauges_are_left_out_if_a_file_cannot_be_read(
    machine: MachineMetrics, tmp_path: Path, stat: str | None
) -> None:
    if stat is not None:
        (tmp_path / "stat").write_text(stat)
    assert shown(machine) == {}


def test_the_gauges_of_this_machine_can_be_read() -> None:
    values = shown(MachineMetrics())
    assert 0 <= values["nv_cpu_utilization"] <= 1
    assert 0 < values["nv_cpu_memory_used_bytes"] < values["nv_cpu_memory_total_bytes"]

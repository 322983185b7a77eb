"""Metrics of the machine and of the host process."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

from host.metrics.families import MetricsSnapshot
from host.release import RELEASE

_STAT = Path("/proc/stat")
_MEMORY = Path("/proc/meminfo")

_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal
_IDLE = (3, 4)  # idle, iowait


class MachineMetrics:
    """Polls `/proc/stat` and `/proc/meminfo` (docs/reference/metrics.md, "Metrics (default port
    8002)").

    The first utilization is the average since the machine started. If a file cannot be read or
    parsed, the gauges are left out of the scrape.
    """

    def __init__(self, stat: Path = _STAT, memory: Path = _MEMORY) -> None:
        self._stat = stat
        self._memory = memory
        self._ticks = (0, 0)  # busy ticks, all ticks
        self._gauges: dict[str, float] = {}

    def sample(self) -> None:
        """Reads the files and computes the gauges."""
        self._gauges = {}
        try:
            ticks = _ticks(self._stat.read_text())
            total, available = _memory(self._memory.read_text())
        except (OSError, ValueError, KeyError, IndexError):
            return
        busy, every = (now - before for now, before in zip(ticks, self._ticks, strict=True))
        self._ticks = ticks
        self._gauges = {
            "nv_cpu_utilization": busy / every if every > 0 else 0.0,
            "nv_cpu_memory_total_bytes": total,
            "nv_cpu_memory_used_bytes": total - available,
        }

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the gauges of the last `sample` to the snapshot."""
        for name, value in self._gauges.items():
            snapshot[name].add((), value)


def _ticks(text: str) -> tuple[int, int]:
    """Busy ticks and all ticks, summed over all processors."""
    fields = [int(field) for field in text.splitlines()[0].split()[1:]]
    busy = sum(fields[place] for place in _BUSY)
    return busy, busy + sum(fields[place] for place in _IDLE)


def _memory(text: str) -> tuple[int, int]:
    """Total and available memory in bytes."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return _bytes(lines["MemTotal"]), _bytes(lines["MemAvailable"])


def _bytes(text: str) -> int:
    return int(text.split()[0]) * 1024


_PROCESS = Path("/proc/self")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessMetrics:
    """Collects `pbhost_build_info` and `process_*` of this process, without its stubs.

    `triton_version`: the version of Triton that clients read. If a file of `/proc` cannot be read,
    such as when no file descriptor is free, its families are left out of the scrape.
    """

    def __init__(self, triton_version: str) -> None:
        self._build = (("triton_version", triton_version), ("version", RELEASE))
        self._booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the numbers of now; reads `/proc`."""
        snapshot["pbhost_build_info"].add(self._build, 1)
        max_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        values = {"max_fds": float(max_fds)}
        for read in (self._read_usage, self._read_open_fds):
            with suppress(OSError):
                values |= read()
        for name, value in values.items():
            snapshot[f"process_{name}"].add((), value)

    def _read_usage(self) -> dict[str, float]:
        _, _, text = (_PROCESS / "stat").read_bytes().rpartition(b")")
        fields = text.split()  # of proc(5), from the third one
        return {
            "virtual_memory_bytes": float(fields[20]),
            "resident_memory_bytes": float(fields[21]) * _PAGE_BYTES,
            "start_time_seconds": self._booted + int(fields[19]) / _TICKS_PER_SECOND,
            "cpu_seconds_total": (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        }

    def _read_open_fds(self) -> dict[str, float]:
        return {"open_fds": float(len(os.listdir(_PROCESS / "fd")))}

"""Gauges of CPU utilization and memory of the machine."""

from __future__ import annotations

from pathlib import Path

from host.metrics.catalogue import MetricsSnapshot

_STAT = Path("/proc/stat")
_MEMORY = Path("/proc/meminfo")

_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal
_IDLE = (3, 4)  # idle, iowait


class MachineMetrics:
    """Polls `/proc/stat` and `/proc/meminfo` (docs/reference/protocol.md, "Metrics (default port
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

"""The version of the server, and what its process uses."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

from host.metrics.catalogue import MetricsSnapshot
from host.release import RELEASE

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

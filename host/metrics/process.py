"""The version of the server, and what its process uses."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from host.metrics.catalogue import MetricsSnapshot
from host.release import RELEASE

_PROCESS = Path("/proc/self")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessMetrics:
    """Collects `pbhost_build_info` and `process_*` of this process, without its stubs.

    `triton_version`: the version of Triton that clients read.
    """

    def __init__(self, triton_version: str) -> None:
        self._build = (("triton_version", triton_version), ("version", RELEASE))
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self._start_seconds = booted + int(_read_stat()[19]) / _TICKS_PER_SECOND

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Add the numbers of now; reads `/proc`."""
        snapshot["pbhost_build_info"].add(self._build, 1)
        stat = _read_stat()
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for name, value in (
            ("virtual_memory_bytes", float(stat[20])),
            ("resident_memory_bytes", float(stat[21]) * _PAGE_BYTES),
            ("start_time_seconds", self._start_seconds),
            ("cpu_seconds_total", (int(stat[11]) + int(stat[12])) / _TICKS_PER_SECOND),
            ("open_fds", float(len(os.listdir(_PROCESS / "fd")))),
            ("max_fds", float(open_files)),
        ):
            snapshot[f"process_{name}"].add((), value)


def _read_stat() -> list[bytes]:
    """Returns the fields of `/proc/self/stat` (proc(5)), from the third one."""
    _, _, fields = (_PROCESS / "stat").read_bytes().rpartition(b")")
    return fields.split()

"""The version of the server, and what its process uses."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import ProcessCollector

from host.metrics.catalogue import MetricsSnapshot


class ProcessMetrics:
    """Collects `pbhost_build_info` and `process_*` of this process, without its stubs.

    `triton_version`: the version of Triton that clients read.
    """

    def __init__(self, triton_version: str) -> None:
        self._build = (("triton_version", triton_version), ("version", version("pbhost")))
        self._process = ProcessCollector(registry=None)

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Add the numbers of now; reads `/proc`."""
        snapshot["pbhost_build_info"].add(self._build, 1)
        for family in self._process.collect():
            for sample in family.samples:
                snapshot[sample.name].add((), sample.value)

"""The metrics of a server among Ray's, so that a scrape of a node has those of its replicas."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from ray.serve import metrics as serve_metrics

from host.metrics.families import MetricFamily, MetricKind, Sample
from host.server.server import Server

_log = logging.getLogger("pbhost")

_SECONDS = 5.0  # Ray itself exports every ten


class MetricsExporter:
    """Passes the metrics of a server on to Ray every few seconds.

    Ray adds the application, the deployment and the replica to the labels, and `ray_` to the names.
    Counters become Ray's counters, which end with `_total`. The parts of histograms and summaries
    (`_bucket`, `_count`, `_sum`) become gauges with the values as the server has them: Ray counts
    single observations only, which a server does not keep.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[object, ...], float] = {}
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Passes the last values on, and ends."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._export()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            await self._export()

    async def _export(self) -> None:
        try:
            families = await self._server.collect_metrics()
            for family in families:
                for sample in family.samples:
                    self._pass_on(family, sample)
        except Exception:  # requests are worth more than their metrics
            _log.exception("metrics could not be passed on to Ray")

    def _pass_on(self, family: MetricFamily, sample: Sample) -> None:
        name, tags = family.name + sample.suffix, dict(sample.labels)
        if sample.numeric_label is not None:
            label, number = sample.numeric_label
            tags[label] = "+Inf" if number == math.inf else f"{number:g}"
        counts = family.kind is MetricKind.COUNTER
        metric = self._metrics.get(name)
        if metric is None:
            kind = serve_metrics.Counter if counts else serve_metrics.Gauge
            metric = kind(name, description=family.help, tag_keys=tuple(tags))
            self._metrics[name] = metric
        if not counts:
            metric.set(sample.value, tags=tags)
            return
        key = (name, *sorted(tags.items()))
        increase = sample.value - self._last.get(key, 0.0)
        self._last[key] = sample.value
        if increase > 0:
            metric.inc(increase, tags=tags)

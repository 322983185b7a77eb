"""Computes rates and quantiles of latency from two overviews of a server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from host.metrics.overview import ModelOverview, ServerOverview


@dataclass(frozen=True, slots=True)
class ModelRates:
    """What a version of a model did between two overviews.

    `requests` and `failures` are per second, `batch_size` is a mean, `p50_us` and `p99_us` are
    latencies in microseconds; these three are NaN without a request.
    """

    model: ModelOverview
    requests: float
    failures: float
    batch_size: float
    p50_us: float
    p99_us: float

    @property
    def serving(self) -> int:
        """The number of instances that take batches."""
        return sum(one.state == "serving" for one in self.model.instances)

    @property
    def restarts(self) -> int:
        """How often stubs of the model were restarted."""
        return sum(one.restarts for one in self.model.instances)

    @property
    def resident_bytes(self) -> int:
        """The memory of all instances."""
        return sum(one.resident_bytes for one in self.model.instances)


def compute_rates(before: ServerOverview | None, now: ServerOverview) -> list[ModelRates]:
    """The rates of each model; since its load if there is no earlier overview.

    A server that was restarted in between, or a model that was loaded, counts from its start.
    """
    earlier: dict[tuple[str, str, int], ModelOverview] = {}
    seconds = now.uptime_seconds
    if before is not None and before.uptime_seconds < now.uptime_seconds:
        earlier = {(one.namespace, one.name, one.version): one for one in before.models}
        seconds -= before.uptime_seconds
    return list(_model_rates(earlier, now.models, max(seconds, 1e-3)))


def _model_rates(
    earlier: dict[tuple[str, str, int], ModelOverview],
    models: Sequence[ModelOverview],
    seconds: float,
) -> Iterator[ModelRates]:
    for model in models:
        old = earlier.get((model.namespace, model.name, model.version))
        if old is None or old.success > model.success or old.executions > model.executions:
            old = ModelOverview(model.name, model.namespace, model.version, "", "")
        executions = model.executions - old.executions
        inferences = model.inferences - old.inferences
        counts = _new_latencies(old.latency, model.latency)
        yield ModelRates(
            model,
            requests=(model.success - old.success) / seconds,
            failures=max(0, model.failure - old.failure) / seconds,
            batch_size=inferences / executions if executions else math.nan,
            p50_us=quantile(counts, 0.50),
            p99_us=quantile(counts, 0.99),
        )


def _new_latencies(
    old: Sequence[tuple[float, int]], new: Sequence[tuple[float, int]]
) -> list[tuple[float, int]]:
    known = dict(old)
    return [(bound, count - known.get(bound, 0)) for bound, count in new]


def quantile(buckets: Sequence[tuple[float, int]], wanted: float) -> float:
    """The upper bound of the bucket with this quantile; NaN without a count."""
    rank = wanted * sum(count for _, count in buckets)
    below = 0
    for bound, count in buckets:
        below += count
        if count and below >= rank:
            return bound
    return math.nan

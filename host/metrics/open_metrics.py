"""Writes metric families in OpenMetrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.utils import floatToGoString

from host.metrics.families import Labels, MetricFamily, MetricKind, Sample

__all__ = ["CONTENT_TYPE", "render_open_metrics"]


class _FamilyCollector:
    """Passes metrics to prometheus_client, which expects a registry with `collect`."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


def render_open_metrics(families: Sequence[MetricFamily]) -> bytes:
    """Returns the body of a scrape; each family has series."""
    names = {family.name for family in families}
    text: bytes = generate_latest(
        _FamilyCollector([_open_metrics_family(family, names) for family in families])
    )  # type: ignore[no-untyped-call]
    return text


def _open_metrics_family(family: MetricFamily, names: set[str]) -> Metric:
    """Converts a family to OpenMetrics; every series keeps its name of the text format.

    OpenMetrics requires that names of counters end in `_total`. A counter with another name gets
    the type `unknown`: Prometheus prefers OpenMetrics, and dashboards for Triton must still find
    `nv_inference_count`.
    """
    name, kind = family.name, family.kind.value
    if family.kind is MetricKind.COUNTER:
        base = name.removesuffix("_total")
        if base == name or base in names:
            kind = "unknown"
        else:
            name = base
    metric = Metric(name, family.help, kind)
    # With a negative bucket bound the sum may decrease: OpenMetrics then forbids _sum and _count.
    sum_may_decrease = any(
        s.numeric_label is not None and s.numeric_label[0] == "le" and s.numeric_label[1] < 0
        for s in family.samples
    )
    for sample in family.samples:
        if not sum_may_decrease or sample.suffix not in ("_sum", "_count"):
            metric.add_sample(
                family.name + sample.suffix, _open_metrics_labels(sample), sample.value
            )
    return metric


def _open_metrics_labels(sample: Sample) -> dict[str, str]:
    labels: Labels = sample.labels
    if sample.numeric_label is not None:
        name, value = sample.numeric_label
        text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
        labels = (*labels, (name, text))
    return dict(labels)

"""Writes metric families in the Prometheus text format (as Triton does) and in OpenMetrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from host.metrics.families import Labels, MetricFamily, MetricKind, Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_TEXT = "text/plain; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text"


def render_exposition(families: Iterable[MetricFamily], accept: str) -> tuple[str, bytes]:
    """The content type and the body of a scrape; `accept` is the client's Accept header.

    Families without series are left out (docs/reference/metrics.md, "Metrics (default port
    8002)").
    """
    shown = [family for family in families if family.samples]
    if _prefers_open_metrics(accept):
        return _render_open_metrics(shown)
    return _TEXT, "".join(_lines(shown)).encode("utf-8", "replace")


def _prefers_open_metrics(accept: str) -> bool:
    qualities: dict[str, float] = {}
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        qualities[media] = max(quality, qualities.get(media, 0.0))
    quality = qualities.get(_OPEN_METRICS, 0.0)
    return quality > 0.0 and quality >= qualities.get("text/plain", 0.0)


def _lines(families: Iterable[MetricFamily]) -> Iterator[str]:
    for family in families:
        name = family.name
        yield f"# HELP {name} {_escape_help(family.help)}\n# TYPE {name} {family.kind.value}\n"
        for sample in family.samples:
            yield f"{name}{sample.suffix}{_labels(sample)} {number(sample.value)}\n"


def _labels(sample: Sample) -> str:
    parts = [f'{name}="{_escape(value)}"' for name, value in sample.labels]
    if sample.numeric_label is not None:
        name, value = sample.numeric_label
        parts.append(f'{name}="{number(value)}"')
    return f"{{{','.join(parts)}}}" if parts else ""


def number(value: float) -> str:
    """Formats a value like Triton: `0`, `7.55`, `1e+16`, `+Inf`, `Nan`."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "Nan"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.16g}"


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape(text: str) -> str:
    return _escape_help(text).replace('"', r"\"")


class _FamilyCollector(NamedTuple):
    """Passes metrics to prometheus_client, which expects a registry with `collect`."""

    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics


def _render_open_metrics(families: Sequence[MetricFamily]) -> tuple[str, bytes]:
    """The content type and the body; each family has series."""
    # Most scrapes are in the other format, and the import of this library takes 30 ms.
    from prometheus_client.openmetrics import exposition

    names = {family.name for family in families}
    text: bytes = exposition.generate_latest(
        _FamilyCollector([_open_metrics_family(family, names) for family in families])
    )  # type: ignore[no-untyped-call]
    return exposition.CONTENT_TYPE_LATEST, text


def _open_metrics_family(family: MetricFamily, names: set[str]) -> Metric:
    """Converts a family to OpenMetrics; every series keeps its name of the text format.

    OpenMetrics requires that names of counters end in `_total`. A counter with another name gets
    the type `unknown`: Prometheus prefers OpenMetrics, and dashboards for Triton must still find
    `nv_inference_count`.
    """
    from prometheus_client.metrics_core import Metric

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
    from prometheus_client.utils import floatToGoString

    labels: Labels = sample.labels
    if sample.numeric_label is not None:
        name, value = sample.numeric_label
        text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
        labels = (*labels, (name, text))
    return dict(labels)

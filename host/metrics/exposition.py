"""Writes metric families in the Prometheus text format (as Triton does) and in OpenMetrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from host.metrics.families import MetricFamily, Sample

_TEXT = "text/plain; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text"


def render_exposition(families: Iterable[MetricFamily], accept: str) -> tuple[str, bytes]:
    """The content type and the body of a scrape; `accept` is the client's Accept header.

    Families without series are left out (docs/reference/metrics.md, "Metrics (default port
    8002)").
    """
    shown = [family for family in families if family.samples]
    if _prefers_open_metrics(accept):
        # Most scrapes are in the other format, and the import of this library takes 30 ms.
        from host.metrics.open_metrics import CONTENT_TYPE, render_open_metrics

        return CONTENT_TYPE, render_open_metrics(shown)
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

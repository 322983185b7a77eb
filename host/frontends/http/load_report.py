"""How full a model is, told to load balancers that ask for it (ORCA; protocol spec 1.9)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from host.frontends.http import json_text as json
from host.frontends.http.exchange import Header, HttpExchange
from host.frontends.http.generate import LoadReport
from host.metrics.family import MetricFamily

_FORMAT = b"endpoint-load-metrics-format"
_FAMILY = "nv_trt_llm_kv_cache_block_metrics"
_LABEL = "kv_cache_block_type"

_log = logging.getLogger("pbhost")


def load_report(families: Callable[[], Iterable[MetricFamily]]) -> LoadReport:
    """What makes the report from the metrics of models, which `families` gives."""

    def report(exchange: HttpExchange) -> Iterable[Header]:
        wanted = exchange.headers.get(_FORMAT)
        if wanted is None:
            return ()
        try:
            return [
                (b"endpoint-load-metrics", _format_report(wanted, _kv_cache_blocks(families())))
            ]
        except ValueError as error:
            _log.error("no report of the load: %s", error)
            return ()

    return report


def _kv_cache_blocks(families: Iterable[MetricFamily]) -> dict[str, float]:
    """What models say of the blocks of their caches, by the kind of number. Raises ValueError."""
    blocks: dict[str, float] = {}
    for family in families:
        if family.name == _FAMILY:
            for sample in family.samples:
                blocks[dict(sample.labels).get(_LABEL, "")] = sample.value
    missing = [kind for kind in ("tokens_per", "used", "max") if kind not in blocks]
    if missing:
        raise ValueError(f"no metric {_FAMILY} with {_LABEL} {' or '.join(missing)}")
    return blocks


def _format_report(wanted: bytes, blocks: dict[str, float]) -> bytes:
    """The report in one of two forms. Raises ValueError for another one."""
    most = blocks["max"]
    full = blocks["used"] / most if most else 0.0
    tokens = int(most * blocks["tokens_per"])
    if wanted == b"text":
        return (
            f"TEXT named_metrics.kv_cache_utilization={full:.6f},"
            f" named_metrics.max_token_capacity={tokens}"
        ).encode()
    if wanted == b"json":
        numbers = {"kv_cache_utilization": full, "max_token_capacity": tokens}
        return b"JSON " + json.dump({"named_metrics": numbers})
    raise ValueError(f"expected format text or json, got {wanted!r}")

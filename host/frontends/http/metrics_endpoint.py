"""The metrics endpoint, and the load of a model in the headers of its responses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from host.errors import unexpected_failure
from host.frontends.error_status import HttpError
from host.frontends.http import json_text as json
from host.frontends.http.generate import LoadReport
from host.frontends.http.http_exchange import HttpExchange, answer_exchange, check_method
from host.frontends.http1.asgi import Header, Message, Receive, Send
from host.frontends.receive_memory import ReceiveBudget
from host.metrics.exposition import render_exposition
from host.metrics.families import MetricFamily

_log = logging.getLogger("pbhost")


class MetricsApp:
    """The ASGI application of the metrics port; calls `families` on each scrape."""

    def __init__(self, families: Callable[[], Iterable[MetricFamily]]) -> None:
        self._families = families
        self._budget = ReceiveBudget()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, self._budget)
        await answer_exchange(exchange, self._scrape(scope, exchange))

    async def _scrape(self, scope: Message, exchange: HttpExchange) -> None:
        if scope["path"] not in ("/metrics", "/metrics/"):
            raise HttpError(f"Not found: {scope['path']}. Try /metrics", 404)
        check_method(exchange, ("GET",))
        accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
        try:
            kind, body = render_exposition(self._families(), accept.decode("latin-1"))
        except Exception as error:  # a defect of ours
            _log.error("unexpected failure of a scrape", exc_info=error)
            raise unexpected_failure(error) from None
        await exchange.send_response(kind.encode(), (body,))


LOAD_REPORT_HEADER = b"endpoint-load-metrics-format"
"""The header of a request that asks for the report; its value is the format."""

_FAMILY = "nv_trt_llm_kv_cache_block_metrics"
_LABEL = "kv_cache_block_type"


def load_report(families: Callable[[], Iterable[MetricFamily]]) -> LoadReport:
    """Returns a function that makes the report from the metrics that `families` returns."""

    def report(exchange: HttpExchange) -> Iterable[Header]:
        wanted = exchange.headers.get(LOAD_REPORT_HEADER)
        if wanted is None:
            return ()
        try:
            return [
                (b"endpoint-load-metrics", _format_report(wanted, _kv_cache_blocks(families())))
            ]
        except ValueError as error:
            _log.error("cannot report the load to a client: %s", error)
            return ()

    return report


def _kv_cache_blocks(families: Iterable[MetricFamily]) -> dict[str, float]:
    """Returns the counts of KV cache blocks that models report, by kind. Raises ValueError."""
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
    """Formats the report as text or JSON. Raises ValueError for another format."""
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

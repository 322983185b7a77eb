"""The metrics endpoint: GET /metrics (docs/reference/protocol.md, "Metrics")."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from host.frontends.http.json_text import error_body
from host.frontends.http1.cycle import Header, Message, Receive, Send
from host.metrics.exposition import render_exposition
from host.metrics.families import MetricFamily

_log = logging.getLogger("pbhost")

_JSON = "application/json"


class MetricsApp:
    """The ASGI application of the metrics port; calls `families` on each scrape."""

    def __init__(self, families: Callable[[], Iterable[MetricFamily]]) -> None:
        self._families = families

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("/metrics", "/metrics/"):
            await _send_response(
                send, 404, _JSON, error_body(f"Not found: {scope['path']}. Try /metrics")
            )
        elif scope["method"] != "GET":
            body = error_body("Method Not Allowed")
            await _send_response(send, 405, _JSON, body, [(b"allow", b"GET")])
        else:
            await self._scrape(scope, send)

    async def _scrape(self, scope: Message, send: Send) -> None:
        accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
        try:
            kind, body = render_exposition(self._families(), accept.decode("latin-1"))
        except Exception as error:  # a defect of ours
            _log.error("unexpected failure of a scrape", exc_info=error)
            text = f"unexpected failure: {type(error).__name__}"
            await _send_response(send, 500, _JSON, error_body(text))
            return
        await _send_response(send, 200, kind, body)


async def _send_response(
    send: Send, status: int, kind: str, body: bytes, more: list[Header] | None = None
) -> None:
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        *(more or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

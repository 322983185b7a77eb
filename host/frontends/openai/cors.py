"""Cross-origin requests: which web pages may read the answers of the OpenAI routes.

Source: the Fetch standard, CORS protocol (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from __future__ import annotations

from collections.abc import Iterable

from host.frontends.http.exchange import Header, HttpExchange

_EVERY_ORIGIN = b"*"
_PREFLIGHT_SECONDS = b"600"  # browsers ask again after this time


class CrossOrigin:
    """Adds the headers for web pages of allowed origins; `*` allows every origin."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def add_headers(self, exchange: HttpExchange) -> None:
        """Adds the headers to the response that will be sent."""
        if not self._origins:
            return
        exchange.response_headers += ((b"vary", b"Origin"),)
        if self._allows(exchange):
            exchange.response_headers += (
                (b"access-control-allow-origin", exchange.headers[b"origin"]),
                (b"access-control-expose-headers", b"x-request-id, retry-after, x-should-retry"),
            )

    def is_preflight(self, exchange: HttpExchange) -> bool:
        """Returns whether a browser asks if a page of an allowed origin may send a request."""
        asks = b"access-control-request-method" in exchange.headers
        return exchange.method == "OPTIONS" and asks and self._allows(exchange)

    def preflight_headers(
        self, exchange: HttpExchange, methods: Iterable[str]
    ) -> tuple[Header, ...]:
        """Returns the headers of the answer to a preflight request."""
        asked = exchange.headers.get(b"access-control-request-headers", b"")
        headers = (
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", _PREFLIGHT_SECONDS),
        )
        return (*headers, (b"access-control-allow-headers", asked)) if asked else headers

    def _allows(self, exchange: HttpExchange) -> bool:
        origin = exchange.headers.get(b"origin")
        return origin is not None and (origin in self._origins or _EVERY_ORIGIN in self._origins)

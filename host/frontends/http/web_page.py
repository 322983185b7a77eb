"""Web pages that are sent whole, and need nothing from elsewhere; one of them is the dashboard."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from host.frontends.http.http_exchange import Header, HttpExchange
from host.frontends.http.routes import Endpoint, Route

HTML = b"text/html; charset=utf-8"
_INLINED = (
    (b'<link rel="stylesheet" href="../common.css">', b"style", "../common.css"),
    (b'<link rel="stylesheet" href="page.css">', b"style", "page.css"),
    (b'<script src="../common.js"></script>', b"script", "../common.js"),
    (b'<script src="page.js"></script>', b"script", "page.js"),
)
NO_CACHE: Header = (b"cache-control", b"no-cache")  # the page fits the version of the server


class WebPage:
    """`page.html`, `page.js` and `page.css` of a folder as one page, and the headers to send.

    All pages have `common.js` and `common.css`, beside this module.
    """

    def __init__(self, folder: Path, without: bytes = b"") -> None:
        """`without`: HTML that is left out, such as a link to a page that is turned off.

        Raises OSError if a file cannot be read.
        """
        page = (folder / "page.html").read_bytes().replace(without, b"")
        for reference, kind, name in _INLINED:
            text = (folder / name).read_bytes()
            page = page.replace(reference, b"<%b>\n%b</%b>" % (kind, text, kind))
        self._page = page
        self._headers: list[Header] = [
            (b"content-security-policy", _policy(self._page)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            NO_CACHE,
        ]

    async def send(self, exchange: HttpExchange) -> None:
        """Sends the page."""
        await exchange.send_response(HTML, (self._page,), self._headers)


def _policy(page: bytes) -> bytes:
    """Returns a content security policy that allows only the scripts and styles of the page."""
    hashes = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rf"<{kind}>(.*?)</{kind}>".encode(), page, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']};"
        " img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'; require-trusted-types-for 'script'"
    ).encode()


DASHBOARD = Endpoint(("GET",), "")  # the page has no data of the server: it asks the other routes

DASHBOARD_ROUTES: Mapping[bytes, Route] = {b"/dashboard": Route(DASHBOARD)}
"""The route of the page by path. It is not part of the inference protocol."""


class DashboardHandler:
    """Handles the endpoint of the page."""

    def __init__(self, api_page: bool) -> None:
        """`api_page`: whether the server has the page to try models."""
        without = b"" if api_page else b'<a href="docs">Try models</a>'
        self._page = WebPage(Path(__file__).parent / "dashboard", without)

    async def dashboard(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the page. It is the same for all servers."""
        await self._page.send(exchange)

"""GET /docs and GET /openapi.json: a web page to try models, and the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from host.core import Core
from host.frontends.http import json_text as json
from host.frontends.http.api_page.document import DescribePaths, openapi_document
from host.frontends.http.exchange import JSON, Header, HttpExchange
from host.frontends.http.routes import Endpoint, Route
from host.frontends.restrictions import Restrictions

_FILE = Path(__file__).with_name("page.html")
_HTML = b"text/html; charset=utf-8"
_NO_CACHE: Header = (b"cache-control", b"no-cache")  # the loaded models change

DOCS = Endpoint(("GET",), "")  # the page has no data of the server, so it is never restricted
OPENAPI = Endpoint(("GET",), "metadata", True)
ROOT = Endpoint(("GET",), "")

ROUTES: Mapping[bytes, Route] = {
    b"/docs": Route(DOCS),
    b"/openapi.json": Route(OPENAPI),
    b"/": Route(ROOT),
}
"""The routes of the page by path. They are not part of the inference protocol."""


class ApiPageHandler:
    """Handles the endpoints of the page."""

    def __init__(
        self,
        core: Core,
        restrictions: Restrictions,
        describe_others: DescribePaths | None = None,
    ) -> None:
        """`describe_others` describes the paths of other APIs."""
        self._core = core
        self._describe_others = describe_others
        self._restrictions = restrictions
        self._page = _FILE.read_bytes()
        self._headers: list[Header] = [
            (b"content-security-policy", _policy(self._page)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            _NO_CACHE,
        ]

    async def docs(self, exchange: HttpExchange, route: Route) -> None:
        """Send the page. It is the same for all servers, and reads the OpenAPI document."""
        await exchange.send_response(_HTML, (self._page,), self._headers)

    async def root(self, exchange: HttpExchange, route: Route) -> None:
        """Send the client to the page; relative, as a proxy may have added a prefix."""
        await exchange.send_response(_HTML, (), [(b"location", b"docs")], 307)

    async def openapi(self, exchange: HttpExchange, route: Route) -> None:
        """Send the OpenAPI document of the models that are loaded now."""
        body = json.dump(openapi_document(self._core, self._restrictions, self._describe_others))
        await exchange.send_response(JSON, (body,), [_NO_CACHE])


def _policy(page: bytes) -> bytes:
    """Return a content security policy that allows only the scripts and styles of the page."""
    hashes = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rf"<{kind}>(.*?)</{kind}>".encode(), page, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']};"
        " img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'; require-trusted-types-for 'script'"
    ).encode()

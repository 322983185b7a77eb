"""GET /docs and GET /openapi.json: a web page to try models, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from host.core import Core
from host.frontends.http import json_text as json
from host.frontends.http.api_page.document import DescribePaths, openapi_document
from host.frontends.http.exchange import JSON, HttpExchange
from host.frontends.http.routes import Endpoint, Route
from host.frontends.http.web_page import HTML, NO_CACHE, WebPage
from host.frontends.restrictions import Restrictions

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
        dashboard: bool = True,
    ) -> None:
        """`describe_others` describes the paths of other APIs.

        `dashboard`: whether the server has the page that the link leads to.
        """
        self._core = core
        self._describe_others = describe_others
        self._restrictions = restrictions
        without = b"" if dashboard else b'<a href="dashboard">Dashboard</a>'
        self._page = WebPage(Path(__file__).parent, without)

    async def docs(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the page. It is the same for all servers, and reads the OpenAPI document."""
        await self._page.send(exchange)

    async def root(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the client to the page; relative, as a proxy may have added a prefix."""
        await exchange.send_response(HTML, (), [(b"location", b"docs")], 307)

    async def openapi(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the OpenAPI document of the models that are loaded now."""
        body = json.dump(openapi_document(self._core, self._restrictions, self._describe_others))
        await exchange.send_response(JSON, (body,), [NO_CACHE])

"""GET /dashboard: a web page that shows what the models of a server do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from host.frontends.http.exchange import HttpExchange
from host.frontends.http.routes import Endpoint, Route
from host.frontends.http.web_page import WebPage

DASHBOARD = Endpoint(("GET",), "")  # the page has no data of the server: it asks the other routes

ROUTES: Mapping[bytes, Route] = {b"/dashboard": Route(DASHBOARD)}
"""The route of the page by path. It is not part of the inference protocol."""


class DashboardHandler:
    """Handles the endpoint of the page."""

    def __init__(self, api_page: bool) -> None:
        """`api_page`: whether the server has the page to try models."""
        without = b"" if api_page else b'<a href="docs">Try models</a>'
        self._page = WebPage(Path(__file__).parent, without)

    async def dashboard(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the page. It is the same for all servers."""
        await self._page.send(exchange)

"""GET /docs and GET /openapi.json: a web page to try models, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from host.core import Core
from host.frontends.http import json_text as json
from host.frontends.http.api_model_paths import DescribedModel, model_paths
from host.frontends.http.api_schemas import (
    Operations,
    Schema,
    component_schemas,
    element_schemas,
    error_responses,
)
from host.frontends.http.api_server_paths import TAGS, diagnostics_paths, server_paths
from host.frontends.http.http_exchange import JSON, HttpExchange
from host.frontends.http.routes import Endpoint, Route
from host.frontends.http.web_page import HTML, NO_CACHE, WebPage
from host.frontends.request_headers import Restrictions

DescribePaths = Callable[[Operations], dict[str, Schema]]
"""Returns path items by path."""


def openapi_document(
    core: Core, restrictions: Restrictions, describe_others: DescribePaths | None = None
) -> Schema:
    """Returns the OpenAPI 3.1 document for the models that are loaded now.

    The extension `x-models` lists the model versions in the form that the page shows; `x-failures`
    has the reasons why models could not be read, by their names. The document contains no values of
    restricted headers. `describe_others` adds paths of other APIs.
    """
    server = core.server_metadata()
    operations = Operations(restrictions)
    models = _models(core)
    paths: dict[str, Schema] = {}
    for model in models:
        paths |= model_paths(model, operations)
    if describe_others is not None:
        paths |= describe_others(operations)
    # The server paths win, as in routing.
    paths |= server_paths(operations) | diagnostics_paths(operations)
    tags = [{"name": name, "description": text} for name, text in TAGS.items()]
    known = TAGS.keys()
    used = [op["tags"][0] for item in paths.values() for op in item.values()]
    tags += [{"name": tag} for tag in dict.fromkeys(used) if tag not in known]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"pbhost: models of {server.name}",
            "version": server.version,
            "description": "The loaded models and the endpoints of the V2 inference protocol.",
        },
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": {
                **component_schemas(),
                **{f"{name}-element": schema for name, schema in element_schemas().items()},
            },
            "responses": error_responses(),
            "securitySchemes": operations.security_schemes(),
        },
        "x-models": [model.summary() for model in models],
        "x-failures": core.load_failures(),
    }


def _models(core: Core) -> list[DescribedModel]:
    ready = core.list_ready_versions()
    latest = dict(ready)  # the last version of each name
    return [
        DescribedModel(
            core.model_metadata(name, str(version)),
            core.model_config(name, str(version)),
            str(version),
            latest[name] == version,
        )
        for name, version in ready
    ]


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
        self._page = WebPage(Path(__file__).parent / "api_page", without)

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

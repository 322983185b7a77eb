"""Web pages: GET /dashboard, and GET /docs to try models, with its GET /openapi.json."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
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
from host.frontends.http.api_server_paths import TAGS, server_paths
from host.frontends.http.http_exchange import JSON, Handler, HttpExchange
from host.frontends.http.routes import Endpoint, Route
from host.frontends.http1.asgi import Header
from host.frontends.request_headers import Restrictions

_HTML = b"text/html; charset=utf-8"
_INLINED = (
    (b'<link rel="stylesheet" href="../common.css">', b"style", "../common.css"),
    (b'<link rel="stylesheet" href="page.css">', b"style", "page.css"),
    (b'<script src="../common.js"></script>', b"script", "../common.js"),
    (b'<script src="page.js"></script>', b"script", "page.js"),
)
_NO_CACHE: Header = (b"cache-control", b"no-cache")  # the page fits the version of the server


class WebPage:
    """`page.html`, `page.js` and `page.css` of a folder as one page, and the headers to send.

    It is sent whole, and needs nothing from elsewhere. All pages have `common.js` and `common.css`,
    beside this module.
    """

    def __init__(self, folder: Path, without: bytes) -> None:
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
            _NO_CACHE,
        ]

    async def send(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the page, which is the same for all servers."""
        await exchange.send_response(_HTML, (self._page,), self._headers)


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


DescribePaths = Callable[[Operations], dict[str, Schema]]
"""Returns path items by path."""


def openapi_document(
    core: Core, restrictions: Restrictions, describe_others: DescribePaths | None
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
    paths |= server_paths(operations)
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


# The pages have no data of the server, so they are never restricted: they ask the other routes.
_DASHBOARD = Endpoint(("GET",), "")
_DOCS = Endpoint(("GET",), "")
_ROOT = Endpoint(("GET",), "")
_OPENAPI = Endpoint(("GET",), "metadata", True)


class WebPages:
    """The dashboard, and the page to try models, with the OpenAPI document that it reads.

    `routes`: those of the pages that the server has, by path; they are not part of the inference
    protocol. `handlers`: by their endpoints.
    """

    def __init__(
        self,
        core: Core,
        restrictions: Restrictions,
        describe_others: DescribePaths | None,
        api_page: bool,
        dashboard: bool,
    ) -> None:
        """`describe_others` describes the paths of other APIs.

        `api_page`, `dashboard`: whether the server has the page; each has a link to the other one.
        """
        self._core = core
        self._restrictions = restrictions
        self._describe_others = describe_others
        self.routes: dict[bytes, Route] = {}
        self.handlers: dict[Endpoint, Handler] = {}
        folder = Path(__file__).parent
        if api_page:
            without = b"" if dashboard else b'<a href="dashboard">Dashboard</a>'
            self._add(b"/docs", _DOCS, WebPage(folder / "api_page", without).send)
            self._add(b"/openapi.json", _OPENAPI, self._send_openapi)
            self._add(b"/", _ROOT, self._redirect)
        if dashboard:
            without = b"" if api_page else b'<a href="docs">Try models</a>'
            self._add(b"/dashboard", _DASHBOARD, WebPage(folder / "dashboard", without).send)

    def _add(self, path: bytes, endpoint: Endpoint, handler: Handler) -> None:
        self.routes[path] = Route(endpoint)
        self.handlers[endpoint] = handler

    async def _redirect(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the client to the page; relative, as a proxy may have added a prefix."""
        await exchange.send_response(_HTML, (), [(b"location", b"docs")], 307)

    async def _send_openapi(self, exchange: HttpExchange, route: Route) -> None:
        """Sends the OpenAPI document of the models that are loaded now."""
        body = json.dump(openapi_document(self._core, self._restrictions, self._describe_others))
        await exchange.send_response(JSON, (body,), [_NO_CACHE])

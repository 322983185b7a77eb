"""The ASGI application of the HTTP endpoints, for pbhost's own server and for others.

The rules are in docs/reference/http.md, "HTTP/REST". Source of the interface: the ASGI
specification, version 3, with its lifespan and HTTP parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote_from_bytes

from host.access.api_keys import CATEGORY_WITHOUT_KEY, ApiKeys
from host.core import Core
from host.frontends.error_status import HttpError
from host.frontends.http import routes
from host.frontends.http.admin import AdminHandler
from host.frontends.http.diagnostics import DiagnosticsHandler
from host.frontends.http.http_exchange import (
    Handler,
    HttpExchange,
    answer_exchange,
    authorize,
    check_method,
    check_restriction,
)
from host.frontends.http.inference_app import InferenceApp
from host.frontends.http.metrics_endpoint import load_report
from host.frontends.http.routes import Endpoint, find_route
from host.frontends.http.web_pages import WebPages
from host.frontends.http1.asgi import App, Message, Receive, Send
from host.frontends.http1.parser import FastHandler
from host.frontends.openai.openai_app import OpenAIApp, find_openai_route
from host.frontends.receive_memory import ReceiveBudget
from host.metrics.families import MetricFamily
from host.options.options import Options
from host.options.validators import read_origins


class HttpApp(InferenceApp):
    """Serves all HTTP endpoints of one core.

    `families` returns the metrics of models. `api_keys`: the keys that clients need; without
    `--api-key-file` only on the OpenAI routes.
    """

    def __init__(
        self,
        core: Core,
        options: Options,
        families: Callable[[], Iterable[MetricFamily]],
        receive_budget: ReceiveBudget,
        api_keys: ApiKeys | None,
    ) -> None:
        self._api_keys = api_keys if options.api_key_file else None
        needs_key = self._api_keys is not None
        super().__init__(core, options, receive_budget, needs_key, load_report(families))
        self._openai = (
            OpenAIApp(
                core,
                options.http_max_input_size,
                self._restrictions,
                self._forwarding,
                self._open_requests,
                api_keys,
                read_origins(options.openai_cors_origins),
            )
            if options.allow_openai
            else None
        )
        describe_others = self._openai.describe_paths if self._openai is not None else None
        pages = WebPages(
            core,
            self._restrictions,
            describe_others,
            options.http_api_page,
            options.http_dashboard,
        )
        self._page_routes = pages.routes
        self._handlers: dict[Endpoint, Handler] = {
            **self._inference_handlers,
            **_administration_handlers(core, options),
            **pages.handlers,
        }

    def fast_path(self, url: bytes, headers: Mapping[bytes, bytes]) -> FastHandler | None:
        """Returns the handler of a request without a task (`host.frontends.http1.parser`)."""
        handler = self._find_infer_handler(url, headers)
        if handler is None and self._openai is not None:
            handler = self._openai.fast_path(url, headers)
        return handler

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, self._receive_budget)
        await answer_exchange(exchange, self._handle_request(exchange, scope["raw_path"]))

    async def _handle_request(self, exchange: HttpExchange, path: bytes) -> None:
        route = find_route(path) or self._page_routes.get(path)
        if route is None and self._openai is not None:
            openai_route = find_openai_route(path)
            if openai_route is not None:
                await self._openai.handle(exchange, openai_route)
                return
        if route is None:
            raise HttpError("Not Found", 404)
        endpoint = route.endpoint
        check_restriction(exchange, endpoint, self._restrictions)
        if self._api_keys is not None and endpoint.category not in ("", CATEGORY_WITHOUT_KEY):
            authorize(exchange, route, self._api_keys)
        check_method(exchange, endpoint.methods)
        handler = self._handlers[endpoint]
        if endpoint.category != "inference":
            await handler(exchange, route)
            return
        with self._open_requests, exchange.count_request():
            await handler(exchange, route)


def _administration_handlers(core: Core, options: Options) -> dict[Endpoint, Handler]:
    """Returns the handlers of the endpoints that send no request to a model."""
    max_input_size = options.http_max_input_size
    admin = AdminHandler(core, max_input_size)
    diagnostics = DiagnosticsHandler(core, max_input_size, options.allow_recording)
    return {
        routes.SERVER_LIVE: admin.live,
        routes.SERVER_READY: admin.ready,
        routes.SERVER_METADATA: admin.server_metadata,
        routes.MODEL_READY: admin.model_ready,
        routes.MODEL_METADATA: admin.model_metadata,
        routes.MODEL_CONFIG: admin.model_config,
        routes.STATISTICS: admin.statistics,
        routes.REPOSITORY_INDEX: admin.repository_index,
        routes.LOAD_MODEL: admin.load_model,
        routes.UNLOAD_MODEL: admin.unload_model,
        routes.NAMED_REPOSITORY_CONTROL: admin.control_in_repository,
        routes.STACKS: diagnostics.stacks,
        routes.OVERVIEW: diagnostics.overview,
        routes.LOG_LINES: diagnostics.log_lines,
        routes.CRASHES: diagnostics.crashes,
        routes.CRASH: diagnostics.crash,
        routes.QUARANTINE: diagnostics.quarantine,
        routes.LIFT_QUARANTINE: diagnostics.lift_quarantine,
        routes.SYSTEM_STATUS: admin.system_status,
        routes.SYSTEM_REGISTER: admin.system_register,
        routes.SYSTEM_UNREGISTER: admin.system_unregister,
        routes.CUDA_STATUS: admin.cuda_status,
        routes.CUDA_REGISTER: admin.cuda_register,
        routes.CUDA_UNREGISTER: admin.cuda_unregister,
        routes.RECORD: diagnostics.record,
        routes.CRASH_REQUESTS: diagnostics.crash_requests,
        routes.TRACE_SETTING: admin.trace_setting,
        routes.LOG_SETTINGS: admin.log_settings,
        routes.TRAFFIC: admin.traffic,
    }


_PATH_CHARACTERS = "/:@!$&'()*+,;=~"  # characters that RFC 3986 allows in a path, beside letters


class AsgiApplication:
    """Adapts the application of the server's own HTTP port to any ASGI server.

    `root_path` of a scope is removed from the path, so the application can be mounted anywhere.
    Bodies of responses are `bytes`: the own port also takes other buffers.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request; an ASGI 3 application. WebSockets are closed."""
        if scope["type"] == "lifespan":
            await _complete_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:

            async def send_bytes(message: Message) -> None:
                body = message.get("body", b"")
                if type(body) is not bytes:
                    message = {**message, "body": bytes(body)}
                await send(message)

            await self._app({**scope, "raw_path": _raw_path(scope)}, receive, send_bytes)


def _raw_path(scope: Message) -> bytes:
    """The path below the root path, as the client has sent it."""
    raw: bytes | None = scope.get("raw_path")  # optional
    path = raw if raw is not None else _quote(scope["path"])
    root = _quote(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(root + b"/") else path


def _quote(path: str) -> bytes:
    return quote_from_bytes(path.encode(), _PATH_CHARACTERS).encode()


async def _complete_lifespan(receive: Receive, send: Send) -> None:
    """Answers the events of start and stop: the models have their own."""
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})

"""The inference endpoints, and an ASGI application of them alone."""

from __future__ import annotations

from collections.abc import Mapping

from host.frontends.http import routes
from host.frontends.http.generate import GenerateHandler, LoadReport
from host.frontends.http.http_exchange import Handler, HttpExchange, answer_exchange
from host.frontends.http.infer_endpoint import InferHandler
from host.frontends.http.metrics_endpoint import LOAD_REPORT_HEADER
from host.frontends.http.routes import Endpoint, Route, find_route
from host.frontends.http1.cycle import App, Message, Receive, Send
from host.frontends.http1.parser import FastHandler
from host.frontends.inference_core import InferenceCore, OpenRequests, SendingKeys
from host.frontends.receive_memory import ReceiveBudget
from host.frontends.request_headers import HeaderForwarding, Restrictions
from host.options.options import Options
from host.options.validators import http_restriction


class InferenceEndpoints:
    """The handlers by endpoint, and `find_fast_handler` for requests without a task.

    `load_report`: for the generate endpoints.
    `needs_key`: each request needs an API key; then all have a task, which checks it.
    `open_requests` counts requests without a task; the application counts all others.
    """

    def __init__(
        self,
        core: InferenceCore,
        options: Options,
        load_report: LoadReport,
        needs_key: bool,
    ) -> None:
        max_input_size = options.http_max_input_size
        self.restrictions = Restrictions(http_restriction(options.http_restricted_api))
        self.forwarding = HeaderForwarding(options.http_header_forward_pattern)
        self.open_requests = OpenRequests()
        needs_task = needs_key or "inference" in self.restrictions
        infer = InferHandler(core, self.forwarding, max_input_size, needs_task, self.open_requests)
        self.find_fast_handler = infer.find_handler
        generate = GenerateHandler(core, max_input_size, load_report)
        self.handlers: dict[Endpoint, Handler] = {
            routes.INFER: infer.infer,
            routes.GENERATE: generate.generate,
            routes.GENERATE_STREAM: generate.generate_stream,
        }


class InferenceApp:
    """Serves the inference endpoints of one core. Call it in the thread of the event loop only.

    `others` answers the requests to all other endpoints, those that are refused, and those that ask
    for a report of the load. After `drain`, new inference requests get status 503.
    """

    def __init__(
        self,
        core: InferenceCore,
        others: App,
        options: Options,
        receive_budget: ReceiveBudget,
        keys: SendingKeys | None = None,
    ) -> None:
        """`keys`: the API keys that clients need."""
        self._others = others
        self._keys = keys
        self._receive_budget = receive_budget
        inference = InferenceEndpoints(core, options, lambda exchange: (), keys is not None)
        self._restrictions = inference.restrictions
        self._open_requests = inference.open_requests
        self._find_infer_handler = inference.find_fast_handler
        self._handlers = inference.handlers
        self.drain = self._open_requests.drain

    @property
    def open_requests(self) -> int:
        """The number of inference requests without a complete response."""
        return self._open_requests.count

    def fast_path(self, url: bytes, headers: Mapping[bytes, bytes]) -> FastHandler | None:
        """Returns the handler of a request without a task (`host.frontends.http1.parser`)."""
        return self._find_infer_handler(url, headers)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request; an ASGI 3 application."""
        exchange = HttpExchange(scope, receive, send, self._receive_budget)
        route = self._find_own_route(exchange, scope["raw_path"])
        if route is None:
            await self._others(scope, receive, send)
        else:
            await answer_exchange(exchange, self._infer(exchange, route))

    def _find_own_route(self, exchange: HttpExchange, path: bytes) -> Route | None:
        """The route of a request that this application answers; None if `others` does."""
        route = find_route(path)
        if (
            route is None
            or route.endpoint not in self._handlers
            or exchange.method not in route.endpoint.methods
            or LOAD_REPORT_HEADER in exchange.headers
            or self._restrictions.missing_header(route.endpoint.category, exchange.header)
            is not None
        ):
            return None
        return route

    async def _infer(self, exchange: HttpExchange, route: Route) -> None:
        if self._keys is None:
            await self._handle(exchange, route)
            return
        header = exchange.headers.get(b"authorization")
        client = self._keys.authorize(route.endpoint.category, header)
        client.check_model(route.resource)
        with client.sending():
            await self._handle(exchange, route)

    async def _handle(self, exchange: HttpExchange, route: Route) -> None:
        with self._open_requests:
            await self._handlers[route.endpoint](exchange, route)

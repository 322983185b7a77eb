"""The inference endpoints of HTTP ports, and an application that answers them alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from host.frontends.http import routes
from host.frontends.http.generate import GenerateHandler, LoadReport
from host.frontends.http.http_exchange import Handler, HttpExchange, answer_exchange
from host.frontends.http.infer_endpoint import InferHandler
from host.frontends.http.metrics_endpoint import LOAD_REPORT_HEADER
from host.frontends.http.routes import Endpoint, Route, find_route
from host.frontends.http1.asgi import App, Message, Receive, Send
from host.frontends.http1.parser import FastHandler
from host.frontends.inference_core import InferenceCore, OpenRequests, SendingKeys
from host.frontends.receive_memory import ReceiveBudget
from host.frontends.request_headers import HeaderForwarding, Restrictions
from host.options.options import Options
from host.options.validators import http_restriction


class InferenceApp(ABC):
    """The ASGI application of an HTTP port, which answers at least the inference endpoints.

    Call it in the thread of the event loop only. After `drain`, new inference requests get status
    503.
    """

    def __init__(
        self,
        core: InferenceCore,
        options: Options,
        receive_budget: ReceiveBudget,
        needs_key: bool,
        load_report: LoadReport = lambda exchange: (),
    ) -> None:
        """`needs_key`: each request needs an API key; then all have a task, which checks it.

        `load_report`: for the generate endpoints.
        """
        max_input_size = options.http_max_input_size
        self._receive_budget = receive_budget
        self._restrictions = Restrictions(http_restriction(options.http_restricted_api))
        self._forwarding = HeaderForwarding(options.http_header_forward_pattern)
        self._open_requests = OpenRequests()
        needs_task = needs_key or "inference" in self._restrictions
        infer = InferHandler(
            core, self._forwarding, max_input_size, needs_task, self._open_requests
        )
        self._find_infer_handler = infer.find_handler
        generate = GenerateHandler(core, max_input_size, load_report)
        self._inference_handlers: dict[Endpoint, Handler] = {
            routes.INFER: infer.infer,
            routes.GENERATE: generate.generate,
            routes.GENERATE_STREAM: generate.generate_stream,
        }

    @property
    def open_requests(self) -> int:
        """The number of inference requests without a complete response."""
        return self._open_requests.count

    async def drain(self, seconds: float) -> bool:
        """Refuses new inference requests and waits some seconds for open ones.

        Returns whether all were answered.
        """
        return await self._open_requests.drain(seconds)

    def fast_path(self, url: bytes, headers: Mapping[bytes, bytes]) -> FastHandler | None:
        """Returns the handler of a request without a task (`host.frontends.http1.parser`)."""
        return self._find_infer_handler(url, headers)

    @abstractmethod
    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request; an ASGI 3 application."""


class ForwardingApp(InferenceApp):
    """Answers the requests to the inference endpoints; `others` answers all others.

    Those are also requests that are refused, and those that ask for a report of the load.
    """

    def __init__(
        self,
        core: InferenceCore,
        others: App,
        options: Options,
        receive_budget: ReceiveBudget,
        keys: SendingKeys | None,
    ) -> None:
        """`keys`: the API keys that clients need."""
        super().__init__(core, options, receive_budget, keys is not None)
        self._others = others
        self._keys = keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
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
            or route.endpoint not in self._inference_handlers
            or exchange.method not in route.endpoint.methods
            or LOAD_REPORT_HEADER in exchange.headers
            or self._restrictions.missing_header(route.endpoint.category, exchange.header)
            is not None
        ):
            return None
        return route

    async def _infer(self, exchange: HttpExchange, route: Route) -> None:
        sending: AbstractContextManager[None] = nullcontext()
        if self._keys is not None:
            header = exchange.headers.get(b"authorization")
            client = self._keys.authorize(route.endpoint.category, header)
            client.check_model(route.resource)
            sending = client.sending()
        with sending, self._open_requests:
            await self._inference_handlers[route.endpoint](exchange, route)

"""The HTTP door: an ASGI application that finds who answers a request, and puts errors into words.

Protocol spec 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from host.core import Core
from host.errors import HostError, internal, unavailable
from host.frontends.forwarding import NO_FORWARDED_HEADERS, HeaderForwarding
from host.frontends.http.admin import AdminHandler
from host.frontends.http.api_page.page import ROUTES, ApiPageHandler
from host.frontends.http.exchange import ClientDisconnected, HttpExchange
from host.frontends.http.fast_path import FastInference
from host.frontends.http.generate import GenerateHandler
from host.frontends.http.infer import InferHandler
from host.frontends.http.inference_header import InferenceHeaderReader
from host.frontends.http.load_report import load_report
from host.frontends.http.routes import Route, find_route
from host.frontends.http.settings import SettingsHandler
from host.frontends.http.shared_memory import SharedMemoryHandler
from host.frontends.http.tensors import JsonInputLimit
from host.frontends.http1.cycle import Message, Receive, Send
from host.frontends.open_requests import OpenRequests
from host.frontends.restrictions import UNRESTRICTED, Restrictions
from host.metrics.family import MetricFamily

_log = logging.getLogger("pbhost")

Handler = Callable[[HttpExchange, Route], Awaitable[None]]

_INFERENCE = "inference"


class HttpApp:
    """All endpoints over one core. Everything here belongs to the event loop's thread.

    `families` are the metrics of models.
    Once `drain` is called, new inference requests are refused with 503.
    """

    def __init__(
        self,
        core: Core,
        max_input_size: int,
        restrictions: Restrictions = UNRESTRICTED,
        forwarding: HeaderForwarding = NO_FORWARDED_HEADERS,
        families: Callable[[], Iterable[MetricFamily]] = tuple,
        api_page: bool = True,
    ) -> None:
        self._restrictions = restrictions
        self._open_requests = OpenRequests()
        header_reader = InferenceHeaderReader(JsonInputLimit(max_input_size))
        fast_inference = FastInference(
            core, restrictions, forwarding, max_input_size, header_reader, self._open_requests
        )
        self.fast_path = fast_inference.find_handler
        """Which requests are answered without a task; see `host.frontends.http1.header_cache`."""
        self.drain = self._open_requests.drain
        parts = (
            InferHandler(core, forwarding, max_input_size, header_reader),
            GenerateHandler(core, max_input_size, load_report(families)),
            AdminHandler(core, max_input_size),
            SharedMemoryHandler(core, max_input_size),
            SettingsHandler(core, max_input_size),
            ApiPageHandler(core, restrictions),
        )
        self._api_page_routes = ROUTES if api_page else {}
        self._handlers: dict[str, Handler] = {
            name: getattr(part, name)
            for part in parts
            for name in dir(part)
            if not name.startswith("_")
        }

    @property
    def open_requests(self) -> int:
        """Inference requests that are not answered yet."""
        return self._open_requests.count

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request; an ASGI 3 application."""
        exchange = HttpExchange(scope, receive, send)
        try:
            await self._handle_request(exchange, scope["raw_path"])
        except HostError as error:
            await exchange.send_error(error, getattr(error, "headers", ()))
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            # The client has gone, and nobody hears this; or the server's time to exit is over.
            if not exchange.response_started:
                await exchange.send_error(unavailable("Server exiting"))
        except Exception as error:  # a defect: logged, and answered if that is still possible
            _log.error("unexpected failure of an HTTP request", exc_info=error)
            if not exchange.response_started:
                await exchange.send_error(internal(f"unexpected failure: {type(error).__name__}"))

    async def _handle_request(self, exchange: HttpExchange, path: bytes) -> None:
        route = find_route(path) or self._api_page_routes.get(path)
        if route is None:
            await exchange.send_error(internal("Not Found"), status=404)
            return
        endpoint = route.endpoint
        lacking = self._restrictions.missing_header(endpoint.category, exchange.header)
        if lacking is not None:
            text = f"This API is restricted, expecting header '{lacking}'"
            await exchange.send_error(internal(text), status=403)
        elif exchange.method not in endpoint.methods:
            allow = [(b"allow", ", ".join(endpoint.methods).encode())]
            await exchange.send_error(internal("Method Not Allowed"), allow, 405)
        elif endpoint.category == _INFERENCE:
            await self._handle_inference(self._handlers[endpoint.name], exchange, route)
        else:
            await self._handlers[endpoint.name](exchange, route)

    async def _handle_inference(
        self, handler: Handler, exchange: HttpExchange, route: Route
    ) -> None:
        if self._open_requests.draining:
            raise unavailable("Server exiting")
        self._open_requests.count += 1
        try:
            await handler(exchange, route)
        finally:
            self._open_requests.request_finished()

"""The HTTP door: an ASGI application that finds who answers a request, and puts errors into words.

Protocol spec 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from host.core import Core
from host.errors import HostError, internal, unavailable
from host.frontends.forwarding import NOTHING_FORWARDED, Forwarding
from host.frontends.http.admin import Administration
from host.frontends.http.api_page.page import ROUTES, ApiPage
from host.frontends.http.exchange import ClientGone, Exchange
from host.frontends.http.fast_path import PromptInference
from host.frontends.http.generate import Generation
from host.frontends.http.infer import Inference
from host.frontends.http.infer_head import HeadReader
from host.frontends.http.load_report import load_report
from host.frontends.http.routes import Route, find_route
from host.frontends.http.settings import Settings
from host.frontends.http.shared_memory import SharedMemory
from host.frontends.http.tensors import JsonLimit
from host.frontends.http1.cycle import Message, Receive, Send
from host.frontends.open_requests import OpenRequests
from host.frontends.restrictions import UNRESTRICTED, Restrictions
from host.metrics.family import Family

_log = logging.getLogger("pbhost")

Handler = Callable[[Exchange, Route], Awaitable[None]]

_INFERENCE = "inference"


class HttpApp:
    """All endpoints over one core. Everything here belongs to the event loop's thread.

    `families` are the metrics of models.
    Once `drain` is called, new inference requests are refused with 503.
    """

    def __init__(
        self,
        core: Core,
        most: int,
        restrictions: Restrictions = UNRESTRICTED,
        forwarding: Forwarding = NOTHING_FORWARDED,
        families: Callable[[], Iterable[Family]] = tuple,
        api_page: bool = True,
    ) -> None:
        self._restrictions = restrictions
        self._open = OpenRequests()
        heads = HeadReader(JsonLimit(most))
        prompt = PromptInference(core, restrictions, forwarding, most, heads, self._open)
        self.starter = prompt.starter
        """Which requests are answered without a task; see `http_heads`."""
        self.drain = self._open.drain
        parts = (
            Inference(core, forwarding, most, heads),
            Generation(core, most, load_report(families)),
            Administration(core, most),
            SharedMemory(core, most),
            Settings(core, most),
            ApiPage(core, restrictions),
        )
        self._pages = ROUTES if api_page else {}
        self._handlers: dict[str, Handler] = {
            name: getattr(part, name)
            for part in parts
            for name in dir(part)
            if not name.startswith("_")
        }

    @property
    def open_requests(self) -> int:
        """Inference requests that are not answered yet."""
        return self._open.count

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request; an ASGI 3 application."""
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange, scope["raw_path"])
        except HostError as error:
            await exchange.refuse(error, getattr(error, "headers", ()))
        except ClientGone:
            pass
        except asyncio.CancelledError:
            # The client has gone, and nobody hears this; or the server's time to exit is over.
            if not exchange.begun:
                await exchange.refuse(unavailable("Server exiting"))
        except Exception as error:  # a defect: logged, and answered if that is still possible
            _log.error("unexpected failure of an HTTP request", exc_info=error)
            if not exchange.begun:
                await exchange.refuse(internal(f"unexpected failure: {type(error).__name__}"))

    async def _answer(self, exchange: Exchange, path: bytes) -> None:
        route = find_route(path) or self._pages.get(path)
        if route is None:
            await exchange.refuse(internal("Not Found"), status=404)
            return
        endpoint = route.endpoint
        lacking = self._restrictions.lacking(endpoint.category, exchange.header)
        if lacking is not None:
            text = f"This API is restricted, expecting header '{lacking}'"
            await exchange.refuse(internal(text), status=403)
        elif exchange.method not in endpoint.methods:
            allow = [(b"allow", ", ".join(endpoint.methods).encode())]
            await exchange.refuse(internal("Method Not Allowed"), allow, 405)
        elif endpoint.category == _INFERENCE:
            await self._infer(self._handlers[endpoint.name], exchange, route)
        else:
            await self._handlers[endpoint.name](exchange, route)

    async def _infer(self, handler: Handler, exchange: Exchange, route: Route) -> None:
        if self._open.exiting:
            raise unavailable("Server exiting")
        self._open.count += 1
        try:
            await handler(exchange, route)
        finally:
            self._open.leave()

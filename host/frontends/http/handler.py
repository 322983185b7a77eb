"""Runs the handler of a request, and answers its errors (docs/reference/protocol.md, "HTTP/REST
(default port 8000)").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from host.errors import HostError, unavailable, unexpected_failure
from host.frontends.http.exchange import ClientDisconnected, HttpExchange
from host.frontends.http.routes import Route

_log = logging.getLogger("pbhost")

Handler = Callable[[HttpExchange, Route], Awaitable[None]]


async def answer_exchange(exchange: HttpExchange, answering: Awaitable[None]) -> None:
    """Awaits the answer to a request; sends an error response if that fails."""
    try:
        await answering
    except HostError as error:
        await exchange.send_error(error, getattr(error, "headers", ()))
    except ClientDisconnected:
        pass
    except asyncio.CancelledError:
        # The client has disconnected, or the exit timeout of the server has passed.
        if not exchange.response_started:
            await exchange.send_error(unavailable("Server exiting"))
    except Exception as error:  # a defect of ours
        _log.error("unexpected failure of an HTTP request", exc_info=error)
        if not exchange.response_started:
            await exchange.send_error(unexpected_failure(error))

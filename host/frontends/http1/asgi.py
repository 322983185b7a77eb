"""The types of ASGI 3, and the extensions of the HTTP/1.1 server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from host.frontends.receive_memory import MessageFiller

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI 3 application."""

Header = tuple[bytes, bytes]

RAW_HEADER_NAMES = "pbhost.header_names"
"""Extension of the ASGI scope: names of headers as received; `headers` has them in lowercase."""

FILL_BODY = "pbhost.fill_body"
"""Extension of `http.request` events that are not the last one: a FillBody of the request."""

FillBody = Callable[[MessageFiller, int], Awaitable[bool]]
"""Reads the rest of a body, of so many bytes, from the socket straight to its place.

Returns False if that is not possible now, and then has read nothing.
"""

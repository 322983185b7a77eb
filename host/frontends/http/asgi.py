"""The HTTP endpoints as an application for other ASGI servers, such as uvicorn or Ray Serve.

Source: the ASGI specification, version 3, with its lifespan and HTTP parts.
"""

from __future__ import annotations

from urllib.parse import quote_from_bytes

from host.frontends.http1.cycle import App, Message, Receive, Send

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

"""Sends comments into silent streams of events, so that proxies do not close the connection."""

from __future__ import annotations

import asyncio

from host.frontends.http.exchange import HttpExchange

_COMMENT = b": \n\n"


class KeepAlive:
    """Sends a comment, which clients ignore, after each `seconds` without a chunk.

    Close it before the last chunk: no comment may follow that.
    """

    def __init__(self, exchange: HttpExchange, seconds: float = 15.0) -> None:
        self._exchange = exchange
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(seconds, self._send_if_silent)

    def chunk_sent(self) -> None:
        """Notes that the stream is not silent."""
        self._last_sent = self._loop.time()

    def close(self) -> None:
        """Sends no more comments."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _send_if_silent(self) -> None:
        left = self._last_sent + self._seconds - self._loop.time()
        if left <= 0:
            left = self._seconds
            if self._task is None or self._task.done():  # otherwise the client does not read
                self._task = self._loop.create_task(self._exchange.send_chunk(_COMMENT))
                self.chunk_sent()
        self._timer = self._loop.call_later(left, self._send_if_silent)

"""Writes small responses straight to the socket of a connection."""

from __future__ import annotations

import asyncio
import os


class SocketWriter:
    """Writes to the socket immediately; the transport would write later in the event loop's turn.

    Data of TLS connections goes to the transport.
    """

    __slots__ = ("_descriptor", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._descriptor = -1
        connected = transport.get_extra_info("socket")
        if connected is not None and transport.get_extra_info("sslcontext") is None:
            self._descriptor = connected.fileno()

    def write(self, data: bytes | memoryview) -> None:
        """Writes a small piece of data, unless the connection is closed.

        The transport gets the data that the socket does not accept. It also detects that the client
        has disconnected.
        """
        transport = self._transport
        if transport.is_closing():
            return  # another connection may have the descriptor now
        if self._descriptor >= 0 and not transport.get_write_buffer_size():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

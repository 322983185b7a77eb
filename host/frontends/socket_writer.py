"""The socket of a connection, for answers that are small enough to leave at once."""

from __future__ import annotations

import asyncio
import os


class SocketWriter:
    """Writes to the socket itself what the transport would write later in the turn of the loop.

    What is to be encrypted goes to the transport.
    """

    __slots__ = ("_descriptor", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._descriptor = -1
        connected = transport.get_extra_info("socket")
        if connected is not None and transport.get_extra_info("sslcontext") is None:
            self._descriptor = connected.fileno()

    def write(self, data: bytes | memoryview) -> None:
        """Write a little, if nobody has closed the connection.

        The transport gets what the socket does not take; if the client has gone, it is the
        transport that hears of it.
        """
        transport = self._transport
        if transport.is_closing():
            return  # the descriptor may be another connection's by now
        if self._descriptor >= 0 and not transport.get_write_buffer_size():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

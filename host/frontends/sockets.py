"""Sockets: those that listen, errors of ports that cannot be used, and direct writes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import ssl
import struct
import termios
from collections.abc import Callable
from contextlib import suppress

from host.errors import HostError, unavailable
from host.frontends.receive_memory import MessageFiller

BACKLOG = 2048
"""Connections that the kernel queues while the endpoint is busy."""


def listening_socket(address: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Opens a listening socket. Raises HostError UNAVAILABLE.

    `address` is a name, an IPv4 address, or `ipv6:[...]`; `port` 0 selects a free port. With
    `reuse_port`, other processes that also set it may listen on the same port.
    """
    listener = _bound_socket(address, port, reuse_port)
    try:
        # On Linux, only this call fails if another process listens on the port.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(f"Socket '{address}:{port}'", error) from None
    return listener


async def accept_connections(
    listening: socket.socket,
    connect: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext | None,
    handshake_timeout: float,
) -> asyncio.Server:
    """Accepts the connections of a listening socket, which is closed if that fails."""
    try:
        return await asyncio.get_running_loop().create_server(
            connect,
            sock=listening,
            ssl=tls,
            ssl_handshake_timeout=handshake_timeout if tls else None,
            backlog=BACKLOG,
        )
    except BaseException:  # also after a cancellation
        listening.close()
        raise


def check_address(address: str, port: int, reuse_port: bool = False) -> None:
    """Raises the error of `listening_socket`, as far as it can be known without listening."""
    _bound_socket(address, port, reuse_port).close()


def _bound_socket(address: str, port: int, reuse_port: bool) -> socket.socket:
    host = address.removeprefix("ipv6:").strip("[]")
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(sockaddr)
            listener.setblocking(False)
        except BaseException:  # also after a cancellation, because nothing else closes the socket
            listener.close()
            raise
    except OSError as error:
        raise _bind_error(f"Socket '{address}:{port}'", error) from None
    return listener


def _bind_error(where: str, error: OSError) -> HostError:
    if error.errno == errno.EADDRINUSE:
        # The trailing space is part of the text (docs/reference/process.md, "Start").
        return unavailable(f"{where} already in use ")
    return unavailable(f"{where} cannot be opened: {error.strerror or error}")


def unsent_bytes(transport: asyncio.Transport | None) -> int:
    """Returns the written bytes that the peer has not acknowledged (tcp(7), SIOCOUTQ)."""
    if transport is None:
        return 0
    connected = transport.get_extra_info("socket")
    in_kernel = 0
    if connected is not None:  # uvloop's TLS transport has no socket after a disconnect
        with suppress(OSError, ValueError):  # the socket may be closed
            in_kernel = struct.unpack("i", fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)))[0]
    return transport.get_write_buffer_size() + in_kernel


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


def fill_from_socket(
    transport: asyncio.Transport,
    protocol: asyncio.Protocol,
    message: MessageFiller,
    size: int,
    received: Callable[[int], None],
    complete: Callable[[], None],
) -> None:
    """Reads the next `size` bytes from a socket to their place in a message, without a copy.

    `protocol` gets what follows. `received` is called with the number of bytes that have arrived,
    `complete` after all of them. Not for TLS.
    """
    _read_with(transport, _Filling(transport, protocol, message, size, received, complete))


def _read_with(transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
    transport.set_protocol(protocol)
    # The loop chooses the way to read when it starts to.
    transport.pause_reading()
    transport.resume_reading()


class _Filling(asyncio.BufferedProtocol):
    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: asyncio.Protocol,
        message: MessageFiller,
        size: int,
        received: Callable[[int], None],
        complete: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._message = message
        self._left = size
        self._received = received
        self._complete = complete

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._message.writable()[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        self._message.advance(nbytes)
        self._received(nbytes)
        if not self._left:
            if not self._transport.is_closing():
                _read_with(self._transport, self._protocol)
            self._complete()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

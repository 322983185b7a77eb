"""A port to listen on, or why it cannot be had."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import socket
import struct
import termios
from contextlib import suppress

from host.errors import HostError, unavailable

BACKLOG = 2048
"""Connections that the kernel keeps for a door that is busy."""


def listening_socket(address: str, port: int, reuse_port: bool = False) -> socket.socket:
    """A socket that listens there. Raises HostError UNAVAILABLE.

    `address` is a name, an IPv4 address, or `ipv6:[...]`; port 0 is a free one. With `reuse_port`,
    others that have asked for the same may listen there too.
    """
    listener = _bound_socket(address, port, reuse_port)
    try:
        listener.listen(BACKLOG)  # only here Linux notices who else has bound the port
    except OSError as error:
        listener.close()
        raise _bind_error(f"Socket '{address}:{port}'", error) from None
    return listener


def check_address(address: str, port: int, reuse_port: bool = False) -> None:
    """Raises what `listening_socket` would raise, as far as it is known without listening."""
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
        except BaseException:  # whatever it is, nobody else would close it; raised again
            listener.close()
            raise
    except OSError as error:
        raise _bind_error(f"Socket '{address}:{port}'", error) from None
    return listener


def _bind_error(where: str, error: OSError) -> HostError:
    if error.errno == errno.EADDRINUSE:
        # The trailing space is part of the text (protocol spec 8.3).
        return unavailable(f"{where} already in use ")
    return unavailable(f"{where} cannot be opened: {error.strerror or error}")


def unsent_bytes(transport: asyncio.Transport | None) -> int:
    """Bytes written to a connection that the other machine has not taken yet (tcp(7), SIOCOUTQ)."""
    if transport is None:
        return 0
    connected = transport.get_extra_info("socket")
    in_kernel = 0
    if connected is not None:  # uvloop's transport of TLS has none once the client is gone
        with suppress(OSError, ValueError):  # it is closed
            in_kernel = struct.unpack("i", fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)))[0]
    return transport.get_write_buffer_size() + in_kernel

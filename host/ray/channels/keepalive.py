"""Ends connections between replicas whose other machine is gone."""

from __future__ import annotations

import socket

_LOST_SECONDS = 10  # without a sign of life from the other machine


def notice_lost_machine(connection: socket.socket) -> None:
    """Ends the connection if the other machine is gone, which sends no end itself.

    Raises OSError if the connection has ended.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _LOST_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_SECONDS * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

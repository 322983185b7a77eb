"""Servers and clients of these tests, closed after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.host.frontends.grpc.h2.h2_peer import Peer, Server
from tests.waiting import FakeClockLoop


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers."""
    servers: list[Server] = []

    def start(*arguments: Any, **named: Any) -> Server:
        servers.append(Server(*arguments, **named))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Peer]]:
    """Makes connections."""
    peers: list[Peer] = []

    def make(server: Server, *arguments: Any, **named: Any) -> Peer:
        peers.append(Peer(server.port, *arguments, **named))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def clock() -> FakeClockLoop:
    """A loop for a server, whose time the test moves."""
    return FakeClockLoop()


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    """One with default limits."""
    return serve()


@pytest.fixture
def peer(server: Server, connect: Callable[..., Peer]) -> Peer:
    """A connection to it."""
    return connect(server)

"""Messages of a stream, which are sent by a short way if nothing stands in it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import hpack
from hypothesis import example, given
from hypothesis import strategies as st

from host.frontends.grpc.h2 import stream_call
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import Router
from host.frontends.grpc.h2.h2_connection import H2Connection
from host.frontends.grpc.h2.h2_stream import JOIN_UP_TO
from host.frontends.grpc.methods import GrpcOptions, Services, StreamMethod, StreamWriter
from host.frontends.receive_memory import ReceiveBudget
from host.instances.busy_polling import no_connection_hook
from tests.memory_transport import MemoryTransport
from tests.unit.host.frontends.grpc.h2.h2_peer import PREFACE, Echo, raw

LIMITS = replace(ConnectionLimits(max_frame=16384), max_send_queue=3000)
BLOCK = hpack.Encoder().encode(
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/test.Test/Chat"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
)

Step = tuple[str, int, bool]
"""A message with its size and `more`, an update of the stream's (True) or the connection's window,
a transport that takes no more or does (True), or a turn of the event loop."""

SIZES = st.integers(0, 40) | st.sampled_from([JOIN_UP_TO - 6, JOIN_UP_TO - 5, JOIN_UP_TO, 20_000])
STEPS = st.lists(
    st.tuples(st.just("message"), SIZES, st.booleans())
    | st.tuples(st.just("window"), st.integers(1, 30_000), st.booleans())
    | st.tuples(st.just("transport"), st.just(0), st.booleans())
    | st.tuples(st.just("turn"), st.just(0), st.just(False)),
    max_size=30,
)


async def send(steps: Sequence[Step], window: int, streams: int) -> list[Any]:
    """What the client has got, and how the connection stands, after each step."""
    opened: list[StreamWriter] = []

    def open_stream(client: StreamWriter, context: object) -> Echo:
        opened.append(client)
        return Echo(client)

    services: Services = {"test.Test": [StreamMethod("Chat", open_stream, "")]}
    connection = H2Connection(
        Router(services, GrpcOptions(), LIMITS).route,
        GrpcOptions(),
        LIMITS,
        lambda _: None,
        lambda _: None,
        no_connection_hook(),
        ReceiveBudget(),
    )
    transport = MemoryTransport()
    connection.connection_made(transport)
    connection.data_received(PREFACE + raw(4, 0, 0, struct.pack(">HI", 4, window)))
    for number in range(streams):
        connection.data_received(raw(1, 4, 2 * number + 1, BLOCK))
    stream, buffer = connection.streams[1], connection.send_buffer
    seen: list[Any] = []
    for kind, size, flag in steps:
        taken = None
        if kind == "message":
            taken = opened[0].write_message(bytes(size), flag)
        elif kind == "window":
            connection.data_received(raw(8, 0, int(flag), struct.pack(">I", size)))
        elif kind == "transport":
            connection.resume_writing() if flag else connection.pause_writing()
        else:
            await asyncio.sleep(0)
        windows, pending = (stream.send_window, buffer.window), stream.pending_bytes
        counts = buffer.data_frames_sent, buffer.buffered_bytes
        seen.append((taken, bytes(transport.data), windows, counts, pending))
    connection.resume_writing()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    seen.append(bytes(transport.data))
    connection.connection_lost(None)
    return seen


@given(steps=STEPS, window=st.sampled_from([0, 20, 5000, 65535]), streams=st.integers(1, 2))
@example([("message", 1, False), ("message", 2, True), ("message", 3, False)], 65535, 1)
@example([("message", 20_000, False)] * 3 + [("message", JOIN_UP_TO - 5, False)] * 2, 1 << 20, 1)
def test_messages_are_equal_frames_by_the_short_way(
    steps: list[Step], window: int, streams: int
) -> None:
    short = asyncio.run(send(steps, window, streams))
    with patch.object(stream_call, "JOIN_UP_TO", -1):
        assert asyncio.run(send(steps, window, streams)) == short

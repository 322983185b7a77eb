"""Connections do the same with the compiled lane and without it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.errors import invalid_argument
from host.frontends.grpc.h2 import calls, reader, stream_call, unary_call
from host.frontends.grpc.h2 import hpack as hpack_decoder
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import Router
from host.frontends.grpc.h2.h2_connection import H2Connection
from host.frontends.grpc.methods import (
    GrpcOptions,
    ResponseCallback,
    RpcContext,
    StreamMethod,
    StreamWriter,
    UnaryMethod,
)
from host.frontends.receive_memory import ReceiveBudget, ReservedBytes
from host.instances.busy_polling import no_connection_hook
from host.lane import read_messages, read_request, state
from tests.conftest import ALL
from tests.memory_transport import MemoryTransport
from tests.unit.host.frontends.grpc.h2.h2_peer import PREFACE, grpc_message
from tests.unit.host.frontends.grpc.h2.test_hpack import CAPTURED
from tests.unit.host.frontends.grpc.h2.test_reader import SETTINGS, frame, frames

pytestmark = pytest.mark.skipif(read_request is None, reason=f"the compiled lane is {state}")

LIMITS = ConnectionLimits(max_frame=16384)


class Work:
    """A request in progress."""

    def __init__(self, seen: list[Any], data: bytes, done: ResponseCallback) -> None:
        self.seen, self.data, self.done = seen, data, done

    def cancel(self) -> None:
        self.seen.append(("cancelled", self.data))


class Chat:
    """A stream that echoes, tells what it gets, and acts on the first letter of a message.

    It takes nothing more after `p` until the next piece arrives; `f` fails, `e` ends the stream.
    """

    def __init__(self, seen: list[Any], client: StreamWriter) -> None:
        self.seen, self.client = seen, client

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        self.seen.append(("message", message))
        if message[:1] == b"f":
            raise invalid_argument("no")
        if message[:1] == b"e":
            self.client.finish_stream(invalid_argument("over"))
            return True
        for more in (True, False):
            if not self.client.write_message(message, more):
                self.seen.append("full")
                return False
        if message[:1] == b"p":
            asyncio.get_running_loop().call_soon(self.client.resume_reading)
            return False
        return True

    def resume_writing(self) -> None:
        self.seen.append("writable")
        self.client.resume_reading()

    def half_closed(self) -> None:
        self.seen.append("half-closed")
        self.client.finish_stream()

    def cancel(self) -> None:
        self.seen.append("cancelled")


class Recorder:
    """A service that records what it gets. Requests that start with `h` are held until later."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.held: list[Work] = []

    def _note(self, data: bytes, context: Any) -> None:
        encodings = context.encoding, context.response_encoding
        self.seen.append((data, context.method.name, context.timeout, encodings, context.fields))

    def start(
        self,
        data: bytes,
        done: ResponseCallback,
        context: RpcContext,
        reserved: ReservedBytes | None,
    ) -> Work:
        self._note(data, context)
        work = Work(self.seen, data, done)
        if data[:1] == b"h":
            self.held.append(work)
        elif data[:1] == b"f":
            raise invalid_argument("no")
        elif data[:1] == b"r":
            done(invalid_argument("refused"))
        else:
            done(data * 3)
        return work

    async def answer(self, data: bytes, context: RpcContext) -> bytes:
        self._note(data, context)
        return data

    def services(self) -> dict[str, list[Any]]:
        return {
            "inference.GRPCInferenceService": [
                UnaryMethod("ModelInfer", self.answer, "", self.start),
                UnaryMethod("Answer", self.answer, ""),
                StreamMethod("Chat", lambda client, _: Chat(self.seen, client), ""),
            ]
        }


async def converse(pieces: Iterable[bytes], limits: ConnectionLimits, pause: bool) -> list[Any]:
    """What the service and the client see, and the state of the connection, after each piece."""
    loop, service, lost = asyncio.get_running_loop(), Recorder(), []
    loop.set_exception_handler(lambda _, problem: lost.append(problem))
    router = Router(service.services(), GrpcOptions(), limits)
    made = H2Connection(
        router.route,
        GrpcOptions(),
        limits,
        lambda _: None,
        lambda _: None,
        no_connection_hook(),
        ReceiveBudget(),
    )
    sink = MemoryTransport()
    made.connection_made(sink)
    seen: list[Any] = []

    def note() -> None:
        decoder = made._header_decoder._decoder
        seen.append(
            (
                bytes(sink.data),
                sink.closed,
                len(service.seen),
                (made._recv_window, made.unacknowledged_bytes, made._last_stream),
                (made.send_buffer.window, made.send_buffer.data_frames_sent),
                (list(decoder._dynamic), decoder._size, decoder.table_changes),
                list(made._reset_streams),
                [
                    (id, stream.send_window, stream.recv_window, stream.remote_ended)
                    + (stream.unacknowledged_bytes, stream._window_increment)
                    + (stream.pending_bytes, stream.incoming_bytes)
                    for id, stream in made.streams.items()
                ],
            )
        )

    for number, piece in enumerate(pieces):
        made.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)
        note()
        if pause:
            made.pause_writing() if number & 1 else made.resume_writing()
        if number % 3 == 2:
            for work in service.held:
                work.done(work.data)
            service.held.clear()
    made.resume_writing()
    made.close()
    note()
    made.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not lost and b"unexpected failure" not in sink.data
    seen.append(service.seen)
    return seen


def without_lane(pieces: Iterable[bytes], limits: ConnectionLimits, pause: bool) -> list[Any]:
    with (
        patch.object(reader, "read_request", None),
        patch.object(reader, "read_messages", None),
        patch.object(stream_call, "encode_small_message", calls.encode_stream_message),
        patch.object(hpack_decoder, "_lane", None),
        patch.object(unary_call, "encode_small_response", calls.encode_response),
    ):
        return asyncio.run(converse(pieces, limits, pause))


def assert_equal(
    pieces: list[bytes], limits: ConnectionLimits = LIMITS, pause: bool = False
) -> list[Any]:
    found = asyncio.run(converse(pieces, limits, pause))
    expected = without_lane(pieces, limits, pause)
    assert len(found) == len(expected)
    for ours, python in zip(found, expected, strict=True):
        assert ours == python
    return found


def update(stream: int, increment: int) -> bytes:
    return frame(8, 0, stream, struct.pack(">I", increment))


def conversation(client: str) -> bytes:
    """Requests with the frames that this client sends: the C core grants windows, too."""
    data = PREFACE + SETTINGS
    core = client.startswith("the C core")
    for number, block in enumerate(CAPTURED[client][:3]):
        stream = 2 * number + 1
        data += frame(1, 4, stream, bytes.fromhex(block))
        data += update(stream, 5) if core else b""
        message = b"" if client == "h2load" else b"held" if number & 1 else bytes(48)
        data += frame(0, 1, stream, grpc_message(message))  # h2load has announced 5 bytes
        data += update(0, 199) if core else b""
    return data


@pytest.mark.parametrize("client", CAPTURED)
def test_clients_are_served_equally_wherever_their_bytes_are_split(client: str) -> None:
    data = conversation(client)
    seen = assert_equal([data])
    position = len(PREFACE + SETTINGS)
    for number in range(3):  # each is read in one call
        assert read_request is not None
        assert (read := read_request(data, position, 1000)) is not None
        position, *_ = read
        assert len(seen[-1][number]) == 5
    assert position == len(data)
    for place in range(len(PREFACE), len(data)):
        assert_equal([data[:place], data[place:]])


@pytest.mark.parametrize("client", CAPTURED)
def test_clients_are_served_equally_with_any_byte_changed(client: str) -> None:
    data = conversation(client)
    for place in range(len(PREFACE) + len(SETTINGS), len(data), 1 if ALL else 7):
        for change in (0, 1, data[place] ^ 0x08, data[place] ^ 0x20, 0xFF):
            assert_equal([data[:place] + bytes((change,)) + data[place + 1 :]])


def chat() -> bytes:
    """Messages of a stream as clients send them, one or several in a frame, and the last."""
    data = PREFACE + SETTINGS + frame(1, 4, 1, block("Chat"))
    for texts in ((b"hello",), (b"a", b"", bytes(20)), (b"pause", b"after"), (b"x" * 40,)):
        data += frame(0, 0, 1, b"".join(map(grpc_message, texts))) + update(1, 20) + update(0, 7)
    return data + frame(0, 1, 1, grpc_message(b"bye"))


def test_streams_are_served_equally_wherever_their_bytes_are_split() -> None:
    data = chat()
    seen = assert_equal([data])
    assert seen[-1].count("half-closed") == 1 and len(seen[-1]) == 9
    assert read_messages is not None
    first = frame(0, 0, 1, grpc_message(b"hello"))
    assert read_messages(data, data.index(first), 1000) == (
        data.index(first) + len(first),
        1,
        [(0, b"hello", None)],
        len(first) - 9,
    )
    for place in range(len(PREFACE), len(data)):
        assert_equal([data[:place], data[place:]])


def test_streams_are_served_equally_with_any_byte_changed() -> None:
    data = chat()
    start = data.index(block("Chat")) + len(block("Chat"))
    for place in range(start, len(data), 1 if ALL else 5):
        for change in (0, 1, data[place] ^ 0x08, data[place] ^ 0x20, 0xFF):
            assert_equal([data[:place] + bytes((change,)) + data[place + 1 :]])


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, max_message_size=10), replace(LIMITS, stream_window=60)]
)
def test_messages_that_may_break_a_limit_are_left_to_python(limits: ConnectionLimits) -> None:
    seen = assert_equal([chat()], limits)
    assert ("message", b"x" * 40) not in seen[-1]


def block(path: str, *extra: tuple[str, str]) -> bytes:
    return hpack.Encoder().encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"/inference.GRPCInferenceService/{path}"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *extra,
        ]
    )


BLOCKS = [
    block("ModelInfer"),
    block("ModelInfer", ("grpc-timeout", "5S"), ("traceparent", "00-1-2-01")),
    block("ModelInfer", ("content-length", "8")),
    block("ModelInfer", ("x-bin", "YWI=")),
    block("ModelInfer", ("grpc-encoding", "gzip")),
    block("ModelInfer", ("x", "y" * 300)),
    block("Answer"),
    block("Chat"),
    block("Unknown"),
    b"\x82",
    b"\xff",
]


@st.composite
def requests(draw: Any) -> bytes:
    stream = draw(st.integers(0, 30).map(lambda number: 2 * number + 1) | st.integers(0, 9))
    data = frame(1, draw(st.sampled_from([4, 4, 4, 5, 0])), stream, draw(st.sampled_from(BLOCKS)))
    increments = st.sampled_from([0, 5, 5, 1 << 20, (1 << 31) - 1])
    for increment in draw(st.lists(increments, max_size=2)):
        data += update(stream, increment)
    message = draw(st.sampled_from([b"", b"abc", b"held", b"fail", b"refused", bytes(5000)]))
    body = grpc_message(message, draw(st.sampled_from([0, 0, 0, 0, 1])))
    cut = draw(st.sampled_from([0, 0, 0, 0, 0, 3, 6]))
    data += frame(0, draw(st.sampled_from([1, 1, 1, 1, 0, 9])), stream, body[: len(body) - cut])
    for increment in draw(st.lists(increments, max_size=2)):
        data += update(0, increment)
    return data


@st.composite
def chats(draw: Any) -> bytes:
    """A stream, if its number is free, and messages of it: whole, several, cut and padded ones."""
    stream = draw(st.sampled_from([1, 1, 1, 3, 9]))
    data = frame(1, 4, stream, block("Chat")) if draw(st.booleans()) else b""
    texts = st.sampled_from([b"", b"abc", b"pause", b"fail", b"end", bytes(300), bytes(5000)])
    for _ in range(draw(st.integers(1, 4))):
        body = b"".join(grpc_message(text) for text in draw(st.lists(texts, max_size=3)))
        body = draw(st.sampled_from([body] * 8 + [body[:-1], body[3:], b"\1" + body[1:]]))
        flags = draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 8]))
        data += frame(0, flags, stream, (b"\0" if flags & 8 else b"") + body)
        data += draw(st.sampled_from([b"", b"", update(stream, 20000), update(0, 30000)]))
    return data


others = st.sampled_from(
    [
        frame(3, 0, 1, bytes(4)),
        frame(3, 0, 5, bytes(4)),
        frame(4, 0, 0, struct.pack(">HI", 4, 0)),
        frame(4, 0, 0, struct.pack(">HI", 4, 10)),
        frame(4, 0, 0, struct.pack(">HI", 4, 100000)),
        frame(6, 0, 0, bytes(8)),
    ]
)
limits = st.sampled_from(
    [
        LIMITS,
        replace(LIMITS, max_turn_cost=600),
        replace(LIMITS, max_streams=2),
        replace(LIMITS, stream_window=6000),
        replace(LIMITS, connection_window=65535, max_header_block=100),
        replace(LIMITS, max_header_list=400, max_frame=100),
        replace(LIMITS, reset_rate=(3, 1)),
    ]
)


def cut(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({place % (len(data) + 1) for place in cuts} | {0, len(data)})
    for start, stop in zip(places, places[1:], strict=False):
        yield data[start:stop]


conversations = st.lists(requests() | requests() | chats() | chats() | others | frames, max_size=20)


@given(conversations, st.lists(st.integers(0, 99999), max_size=6), limits, st.booleans())
@settings(max_examples=5_000 if ALL else 150, deadline=None)
def test_random_conversations_are_equal(
    parts: list[bytes], cuts: list[int], limits: ConnectionLimits, pause: bool
) -> None:
    assert_equal([PREFACE + SETTINGS, *cut(b"".join(parts), cuts)], limits, pause)

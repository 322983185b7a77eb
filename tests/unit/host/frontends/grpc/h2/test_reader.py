"""The frame decoder and whole connections, fed with anything in any pieces."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host.frontends.grpc.h2.frames import ConnectionLimits, H2ConnectionError, H2ErrorCode
from host.frontends.grpc.h2.frontend import Router
from host.frontends.grpc.h2.grpc_messages import ReceivedMessage
from host.frontends.grpc.h2.h2_connection import H2Connection
from host.frontends.grpc.h2.reader import FrameReader
from host.frontends.grpc.methods import GrpcOptions
from host.frontends.receive_memory import Piece, ReceiveBudget
from host.instances.busy_polling import no_connection_hook
from tests.memory_transport import MemoryTransport
from tests.unit.host.frontends.grpc.h2.h2_peer import PREFACE, TestService, grpc_message

if TYPE_CHECKING:
    from host.lane._lane import RequestFrames

LIMITS = ConnectionLimits(max_frame=16384, no_op_frame_rate=(1 << 30, 1), reset_rate=(1 << 30, 1))


class Recorded(FrameReader):
    """Records frames; pieces of one DATA frame are put together again."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        super().__init__(limits)
        self.events: list[Any] = []

    def on_data(self, stream: int, piece: Piece, size: int, end: bool) -> None:
        last: tuple[Any, ...] = self.events[-1] if self.events else ()
        if last[:2] == ("data", stream) and not last[4]:
            self.events[-1] = ("data", stream, last[2] + bytes(piece), last[3] + size, end)
        elif piece or end or size:
            self.events.append(("data", stream, bytes(piece), size, end))

    def on_headers(self, stream: int, block: bytes, end: bool) -> None:
        self.events.append(("headers", stream, block, end))

    def on_request(self, request: RequestFrames) -> bool:
        """Takes the requests of every other stream."""
        _, stream, block, message, size, increment, connection_increment = request
        if not stream & 2:
            return super().on_request(request)
        self.on_headers(stream, block, False)
        if increment:
            self.on_window_update(stream, increment)
        self.on_data(stream, grpc_message(message), size, True)
        if connection_increment:
            self.on_window_update(0, connection_increment)
        return True

    def on_messages(
        self, stop: int, stream: int, messages: Sequence[ReceivedMessage], size: int
    ) -> bool:
        """Takes the messages of every other stream."""
        if stream & 2:
            return False
        body = b"".join(grpc_message(message, flag) for flag, message, _ in messages)
        assert size == len(body)
        self.on_data(stream, body, size, False)
        return True

    def on_settings(self, values: list[tuple[int, int]]) -> None:
        self.events.append(("settings", values))

    def on_settings_ack(self) -> None:
        self.events.append(("settings_ack",))

    def on_ping(self, data: bytes, ack: bool) -> None:
        self.events.append(("ping", data, ack))

    def on_window_update(self, stream: int, increment: int) -> None:
        self.events.append(("window_update", stream, increment))

    def on_rst_stream(self, stream: int) -> None:
        self.events.append(("rst_stream", stream))

    def on_goaway(self, code: int) -> None:
        self.events.append(("goaway", code))

    def on_no_op_frame(self) -> None:
        self.events.append(("no_op_frame",))

    def on_stream_error(self, stream: int, code: H2ErrorCode) -> None:
        self.events.append(("stream_error", stream, code))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = len(payload)
    return struct.pack(">HBBBI", length >> 8, length & 255, kind, flags, stream) + payload


frames = st.builds(
    frame,
    st.integers(0, 11) | st.integers(0, 255),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 0x20, 0x24, 0x2D]) | st.integers(0, 255),
    st.sampled_from([0, 1, 3, 5]) | st.integers(0, (1 << 32) - 1),
    st.binary(max_size=40)
    | st.sampled_from([bytes(4), bytes(8), b"\0\4\0\0\0\5", hpack.Encoder().encode([("a", "b")])]),
)
SETTINGS = frame(4, 0, 0, b"")
requests = st.builds(
    lambda stream, block, message, flag, end, updates, connection: (
        frame(1, 4, stream, block)
        + (frame(8, 0, stream, struct.pack(">I", updates)) if updates else b"")
        + frame(0, end, stream, grpc_message(message, flag))
        + (frame(8, 0, 0, struct.pack(">I", connection)) if connection else b"")
    ),
    st.integers(0, 12),
    st.binary(max_size=20),
    st.binary(max_size=40),
    st.sampled_from([0, 0, 0, 0, 1, 255]),
    st.sampled_from([1, 1, 1, 0, 9, 255]),
    st.sampled_from([0, 5, 5, 1 << 31, (1 << 31) - 1, (1 << 32) - 1]),
    st.sampled_from([0, 5, 5, 1 << 31, (1 << 32) - 1]),
)
"""Requests as clients send them, with the frames of their windows, and others."""
streams_of_frames = st.lists(frames | requests, max_size=30).map(
    lambda many: PREFACE + SETTINGS + b"".join(many)
)
anything = (
    streams_of_frames | st.binary(max_size=200) | st.binary(max_size=200).map(PREFACE.__add__)
)


def split(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for start, stop in zip(places, places[1:], strict=False):
        yield data[start:stop]


def by_sums(events: list[Any]) -> list[Any]:
    """Adds up increments of one window, one after the other, as the compiled lane does."""
    found: list[Any] = []
    for event in events:
        if found and event[0] == "window_update" and event[:2] == found[-1][:2]:
            event = (*event[:2], found.pop()[2] + event[2])
        found.append(event)
    return found


def read(
    pieces: Iterator[bytes] | list[bytes], limits: ConnectionLimits = LIMITS
) -> tuple[list[Any], H2ErrorCode | None]:
    reader = Recorded(limits)
    try:
        for piece in pieces:
            reader.feed(piece)
            while reader.paused:
                reader.feed(b"")
    except H2ConnectionError as fault:
        return by_sums(reader.events), fault.code
    return by_sums(reader.events), None


@given(anything, st.lists(st.integers(0, 10000), max_size=20))
@settings(max_examples=300, deadline=None)
def test_frames_do_not_depend_on_how_they_arrive(data: bytes, cuts: list[int]) -> None:
    whole = read([data])
    assert read(split(data, cuts)) == whole
    assert read(data[i : i + 1] for i in range(len(data))) == whole


@given(anything, st.lists(st.integers(0, 10000), max_size=20), st.integers(0, 600))
@settings(max_examples=300, deadline=None)
def test_frames_do_not_depend_on_the_turns_in_which_they_are_read(
    data: bytes, cuts: list[int], cost: int
) -> None:
    short_turns = replace(LIMITS, max_turn_cost=cost)
    assert read(split(data, cuts), short_turns) == read([data])


def test_the_reader_pauses_after_the_requests_of_one_turn() -> None:
    requests = [frame(1, 5, 2 * number + 1, REQUEST_BLOCK) for number in range(100)]
    reader = Recorded(replace(LIMITS, max_turn_cost=10 * 256))
    reader.feed(PREFACE + SETTINGS)
    reader.events.clear()
    counts = []
    reader.feed(b"".join(requests))
    while reader.paused:
        counts.append(len(reader.events))
        reader.feed(b"")
    assert counts == list(range(counts[0], 100, counts[0])) and 5 < counts[0] <= 10
    assert [event[1] for event in reader.events] == list(range(1, 200, 2))


def test_other_connections_have_their_turn_while_many_requests_are_read() -> None:
    async def run() -> None:
        made, _ = connection(replace(LIMITS, max_turn_cost=10 * 256))
        requests = [frame(1, 4, 2 * number + 1, REQUEST_BLOCK) for number in range(100)]
        made.data_received(PREFACE + SETTINGS + b"".join(requests))
        counts = [made.open_streams]
        while counts[-1] < 100:
            await asyncio.sleep(0)
            counts.append(made.open_streams)
        assert len(counts) > 9
        made.close()
        made.connection_lost(None)

    asyncio.run(run())


def connection(limits: ConnectionLimits = LIMITS) -> tuple[H2Connection, MemoryTransport]:
    router = Router(TestService().services(), GrpcOptions(), limits)
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
    return made, sink


REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/EchoStream"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
REQUEST_BLOCK = hpack.Encoder().encode(REQUEST)
sensible = st.sampled_from(
    [
        frame(1, 4, 1, REQUEST_BLOCK),
        frame(1, 5, 3, REQUEST_BLOCK),
        frame(0, 0, 1, grpc_message(b"hello")),
        frame(0, 1, 1, grpc_message(b"hello")),
        frame(0, 0, 1, b"\0\0\0\0\x09he"),
        frame(3, 0, 1, bytes(4)),
        frame(8, 0, 0, b"\0\0\1\0"),
        frame(8, 0, 1, b"\0\0\1\0"),
        frame(4, 0, 0, struct.pack(">HI", 4, 0)),
        frame(4, 0, 0, struct.pack(">HI", 4, 100000)),
    ]
)
conversations = st.lists(sensible | frames, max_size=40).map(
    lambda many: PREFACE + SETTINGS + b"".join(many)
)


@given(conversations | anything, st.lists(st.integers(0, 10000), max_size=5), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_bytes_raise_nothing_into_the_event_loop(
    data: bytes, cuts: list[int], lost: bool
) -> None:
    async def run() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        made, sink = connection()
        for piece in split(data, cuts):
            made.data_received(piece)
            await asyncio.sleep(0)
        if lost:
            made.connection_lost(None)
        made.close()
        made.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not problems
        assert not made.streams
        assert b"unexpected failure" not in sink.data

    asyncio.run(run())


def test_a_client_that_sends_much_and_finishes_nothing_takes_little_memory() -> None:
    """A stream of messages that its handler does not take: windows end before memory does."""
    limits = ConnectionLimits(stream_window=1 << 20, connection_window=4 << 20)

    async def run() -> int:
        made, sink = connection(limits)
        made.data_received(PREFACE + SETTINGS)
        block = hpack.Encoder().encode(
            [(k, v if k != ":path" else "/test.Test/Sink") for k, v in REQUEST]
        )
        body = grpc_message(bytes(16379))
        tracemalloc.start()
        for number in range(1, 2001, 2):
            made.data_received(frame(1, 4, number, block))
            for _ in range(60):
                made.data_received(frame(0, 0, number, body))
            if sink.closed:
                break
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sink.closed, "a gigabyte has been taken"
        assert b"granted" in sink.data
        made.connection_lost(None)
        await asyncio.sleep(0)
        return peak

    assert asyncio.run(run()) < 16 << 20


def test_large_frames_are_not_copied_over_and_over() -> None:
    """Bytes copied while a frame of one MiB arrives in pieces of 64 KiB: by their peak."""
    reader = Recorded(ConnectionLimits())
    payload = bytes(1 << 20)
    data = PREFACE + SETTINGS + frame(0, 1, 1, payload)
    pieces: list[int] = []
    reader.on_data = lambda stream, piece, size, end: pieces.append(size)  # type: ignore[method-assign]  # of this object
    for start in range(0, len(data), 65536):
        reader.feed(data[start : start + 65536])
    assert sum(pieces) == len(payload) and len(pieces) == 17


@pytest.mark.parametrize("most", [100, 16384])
def test_frames_may_be_as_large_as_the_limit_and_no_larger(most: int) -> None:
    reader = Recorded(ConnectionLimits(max_frame=most))
    reader.feed(PREFACE + SETTINGS + frame(0, 0, 1, bytes(most)))
    with pytest.raises(H2ConnectionError):
        reader.feed(frame(0, 0, 1, bytes(most + 1)))

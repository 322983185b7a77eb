"""The server's end of an HTTP/2 connection: streams, receive window, errors and shutdown."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Callable

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from host.frontends.grpc.h2.frames import ConnectionLimits, H2ErrorCode
from tests.conftest import DEADLINE, wait_until
from tests.unit.host.frontends.grpc.h2.h2_peer import (
    PREFACE,
    Connect,
    Peer,
    Serve,
    Server,
    grpc_message,
    raw,
)

OK = {"grpc-status": "0"}
LIMITS = ConnectionLimits()


def test_both_sides_say_their_settings_and_acknowledge(peer: Peer) -> None:
    first = peer.read()
    assert isinstance(first, SettingsFrame) and "ACK" not in first.flags
    assert first.settings[SettingsFrame.MAX_CONCURRENT_STREAMS] == LIMITS.max_streams
    assert first.settings[SettingsFrame.INITIAL_WINDOW_SIZE] >= 4 << 20
    acknowledged = peer.until(lambda frame: isinstance(frame, SettingsFrame))
    assert "ACK" in acknowledged.flags


def test_a_call_is_answered_with_head_message_and_trailers(peer: Peer) -> None:
    head, body, trailers = peer.answer(peer.call("Echo", b"hello"))
    assert head == {":status": "200", "content-type": "application/grpc"}
    assert (body, trailers) == (grpc_message(b"hello"), OK)


def test_the_split_of_the_bytes_does_not_matter(server: Server, connect: Connect) -> None:
    peer = connect(server, greet=False)
    block = peer.block("Echo")
    data = (
        PREFACE
        + SettingsFrame(0).serialize()
        + HeadersFrame(1, block, flags=["END_HEADERS"]).serialize()
        + DataFrame(1, grpc_message(b"hello"), flags=["END_STREAM"]).serialize()
    )
    for position in range(len(data)):
        peer.write(data[position : position + 1])
    assert peer.answer(1)[1:] == (grpc_message(b"hello"), OK)
    for step in (2, 3, 7, 11):
        other = connect(server, greet=False)
        for position in range(0, len(data), step):
            other.write(data[position : position + step])
        assert other.answer(1)[1:] == (grpc_message(b"hello"), OK)


def test_padding_and_priority_are_removed(peer: Peer) -> None:
    headers = HeadersFrame(1, peer.block("Echo"), flags=["END_HEADERS", "PADDED", "PRIORITY"])
    headers.pad_length, headers.stream_weight = 20, 3
    data = DataFrame(1, grpc_message(b"hello"), flags=["PADDED", "END_STREAM"])
    data.pad_length = 200
    peer.send(PriorityFrame(5), headers, data)
    assert peer.answer(1)[1:] == (grpc_message(b"hello"), OK)


def test_padding_does_not_pass_for_a_message(peer: Peer) -> None:
    stream = peer.open("Echo")
    data = DataFrame(stream, b"\0\0\0", flags=["PADDED", "END_STREAM"])
    data.pad_length = 20
    peer.send(data)
    assert peer.status(stream) == 13
    assert peer.status(peer.call("Echo", b"")) == 0


def test_padding_is_returned_to_the_flow_control_window(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(stream_window=1000)))
    stream = peer.open("Echo")
    for _ in range(50):
        frame = DataFrame(stream, b"", flags=["PADDED"])
        frame.pad_length = 99
        peer.send(frame)
        peer.settle()
    peer.data(stream, grpc_message(b"hello"), end=True)
    assert peer.answer(stream)[2] == OK


def test_a_header_block_may_be_continued(peer: Peer) -> None:
    block = peer.block("Echo", ("some-metadata", "x" * 50))
    peer.send(
        HeadersFrame(1, block[:5]),
        ContinuationFrame(1, block[5:20]),
        ContinuationFrame(1, block[20:], flags=["END_HEADERS"]),
    )
    peer.data(1, grpc_message(b"hello"), end=True)
    assert peer.answer(1)[2] == OK


def test_unknown_frames_and_flags_are_ignored(peer: Peer) -> None:
    peer.write(raw(0x42, 0xFF, 7, b"what?") + raw(0x43, 0, 0, b""))
    assert peer.status(peer.call("Echo", b"")) == 0


def test_a_ping_is_answered(peer: Peer) -> None:
    peer.settle(b"12345678")
    last = peer.frames[-1]
    assert isinstance(last, PingFrame) and "ACK" in last.flags


@pytest.mark.parametrize(
    "garbage, code",
    [
        (b"GET / HTTP/1.1\r\n\r\n", H2ErrorCode.PROTOCOL_ERROR),
        (PREFACE + PingFrame(0, b"12345678").serialize(), H2ErrorCode.PROTOCOL_ERROR),
        (PREFACE + SettingsFrame(0, flags=["ACK"]).serialize(), H2ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_an_invalid_preface_ends_the_connection(
    server: Server, connect: Connect, garbage: bytes, code: int
) -> None:
    peer = connect(server, greet=False)
    peer.write(garbage)
    assert peer.goaway().error_code == code
    assert peer.ended()


CONNECTION_ERRORS = {
    "data without a stream": (raw(0, 0, 0, b"x"), H2ErrorCode.PROTOCOL_ERROR),
    "data on an idle stream": (raw(0, 0, 5, b"x"), H2ErrorCode.PROTOCOL_ERROR),
    "headers without a stream": (raw(1, 4, 0, b"x"), H2ErrorCode.PROTOCOL_ERROR),
    "a stream with an even number": (raw(1, 4, 2, b"\x82"), H2ErrorCode.PROTOCOL_ERROR),
    "padding longer than its frame": (raw(0, 8, 1, b"\x09abc"), H2ErrorCode.PROTOCOL_ERROR),
    "padded data without a length": (raw(0, 8, 1, b""), H2ErrorCode.FRAME_SIZE_ERROR),
    "padding longer than headers": (raw(1, 12, 1, b"\x09abc"), H2ErrorCode.PROTOCOL_ERROR),
    "headers too short for a priority": (raw(1, 0x24, 1, b"abc"), H2ErrorCode.FRAME_SIZE_ERROR),
    "a block that cannot be decoded": (
        raw(1, 4, 1, b"\xff\xff\xff"),
        H2ErrorCode.COMPRESSION_ERROR,
    ),
    "an index without an entry": (raw(1, 4, 1, b"\xfe"), H2ErrorCode.COMPRESSION_ERROR),
    "no room for an idle stream": (raw(8, 0, 9, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "a priority of four bytes for an idle stream": (
        raw(2, 0, 9, bytes(4)),
        H2ErrorCode.FRAME_SIZE_ERROR,
    ),
    "reset without a stream": (raw(3, 0, 0, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "a reset of three bytes": (raw(3, 0, 1, bytes(3)), H2ErrorCode.FRAME_SIZE_ERROR),
    "settings on a stream": (raw(4, 0, 1, b""), H2ErrorCode.PROTOCOL_ERROR),
    "settings of seven bytes": (raw(4, 0, 0, bytes(7)), H2ErrorCode.FRAME_SIZE_ERROR),
    "an answer to settings with a payload": (raw(4, 1, 0, bytes(6)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a window beyond its maximum": (
        raw(4, 0, 0, struct.pack(">HI", 4, 1 << 31)),
        H2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "frames smaller than allowed": (
        raw(4, 0, 0, struct.pack(">HI", 5, 16383)),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "frames larger than allowed": (
        raw(4, 0, 0, struct.pack(">HI", 5, 1 << 24)),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "push neither on nor off": (
        raw(4, 0, 0, struct.pack(">HI", 2, 2)),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "hundreds of settings": (
        raw(4, 0, 0, struct.pack(">HI", 99, 2) * 500),
        H2ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a push": (PushPromiseFrame(1, 2, b"").serialize(), H2ErrorCode.PROTOCOL_ERROR),
    "a ping of seven bytes": (raw(6, 0, 0, bytes(7)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a ping on a stream": (raw(6, 0, 1, bytes(8)), H2ErrorCode.PROTOCOL_ERROR),
    "goaway on a stream": (raw(7, 0, 1, bytes(8)), H2ErrorCode.PROTOCOL_ERROR),
    "a goaway of seven bytes": (raw(7, 0, 0, bytes(7)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a window update of zero": (raw(8, 0, 0, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "a window update of five bytes": (raw(8, 0, 0, bytes(5)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a window update of an idle stream": (
        raw(8, 0, 9, b"\0\0\0\1"),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "a window that overflows": (
        raw(8, 0, 0, b"\x7f\xff\xff\xff"),
        H2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a continuation of nothing": (raw(9, 4, 1, b""), H2ErrorCode.PROTOCOL_ERROR),
    "another frame inside of a block": (
        raw(1, 0, 1, b"\x82") + raw(6, 0, 0, bytes(8)),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "data inside of a block": (
        raw(1, 0, 1, b"\x82") + raw(0, 0, 1, b"x"),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "a block continued on another stream": (
        raw(1, 0, 1, b"\x82") + raw(9, 4, 3, b""),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "a priority without a stream": (raw(2, 0, 0, bytes(5)), H2ErrorCode.PROTOCOL_ERROR),
    "a frame that is too large": (
        struct.pack(">HBBBI", 0xFFFF, 0xFF, 0, 0, 1),
        H2ErrorCode.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_a_connection_error_closes_the_connection_and_cancels_its_calls(
    server: Server, peer: Peer, name: str
) -> None:
    data, code = CONNECTION_ERRORS[name]
    held = peer.call("Hold", b"held")
    server.service.held.get(timeout=DEADLINE)
    peer.write(data)
    frame = peer.goaway()
    assert (frame.error_code, frame.last_stream_id >= held) == (code, True)
    assert frame.additional_data or code is H2ErrorCode.NO_ERROR
    assert server.service.cancelled.get(timeout=DEADLINE) == b"held"
    assert peer.ended()


def test_headers_on_a_closed_stream_end_the_connection(peer: Peer) -> None:
    stream = peer.call("Echo", b"")
    peer.answer(stream)
    peer.send(HeadersFrame(stream, peer.block("Echo"), flags=["END_HEADERS"]))
    assert peer.goaway().error_code == H2ErrorCode.STREAM_CLOSED


STREAM_ERRORS: dict[str, tuple[Callable[[int], Frame | bytes], int]] = {
    "a window update of zero": (lambda s: raw(8, 0, s, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "a window that overflows": (
        lambda s: WindowUpdateFrame(s, (1 << 31) - 1),
        H2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a priority of four bytes": (lambda s: raw(2, 0, s, bytes(4)), H2ErrorCode.FRAME_SIZE_ERROR),
    "data after the end": (lambda s: DataFrame(s, b"more"), H2ErrorCode.STREAM_CLOSED),
    "trailers after the end": (
        lambda s: HeadersFrame(s, b"\x00\x01a\x01b", flags=["END_HEADERS", "END_STREAM"]),
        H2ErrorCode.STREAM_CLOSED,
    ),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_a_stream_error_ends_only_that_stream(server: Server, peer: Peer, name: str) -> None:
    frame, code = STREAM_ERRORS[name]
    stream = peer.call("Hold", b"held")
    server.service.held.get(timeout=DEADLINE)
    made = frame(stream)
    peer.write(made if isinstance(made, bytes) else made.serialize())
    assert peer.reset_code(stream) == code
    assert server.service.cancelled.get(timeout=DEADLINE) == b"held"
    assert peer.status(peer.call("Echo", b"")) == 0


MALFORMED: dict[str, list[tuple[str, str]]] = {
    "no path": [(":method", "POST"), (":scheme", "http")],
    "an empty path": [(":method", "POST"), (":scheme", "http"), (":path", "")],
    "a repeated pseudo-header": [
        (":method", "POST"),
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/"),
    ],
    "an unknown pseudo-header": [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/"),
        (":what", "x"),
    ],
    "a pseudo-header too late": [
        (":method", "POST"),
        (":scheme", "http"),
        ("te", "trailers"),
        (":path", "/"),
    ],
    "an upper-case name": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("A", "b")],
    "a name with a space": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("a b", "")],
    "a line break": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("a", "b\r\nc")],
    "a field of connections": [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/"),
        ("connection", "close"),
    ],
    "te that is not trailers": [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/"),
        ("te", "gzip"),
    ],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_reset(peer: Peer, name: str) -> None:
    block = peer.encoder.encode(MALFORMED[name])
    peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
    assert peer.reset_code(1) == H2ErrorCode.PROTOCOL_ERROR
    peer.data(1, b"was on its way")  # is not the client's fault
    peer.next_stream = 3
    assert peer.status(peer.call("Echo", b"")) == 0


def test_request_trailers_end_the_request(peer: Peer) -> None:
    stream = peer.open("Echo")
    peer.data(stream, grpc_message(b"hello"))
    block = peer.encoder.encode([("some", "trailer")])
    peer.send(HeadersFrame(stream, block, flags=["END_HEADERS", "END_STREAM"]))
    assert peer.answer(stream)[1:] == (grpc_message(b"hello"), OK)


def test_trailers_that_do_not_end_a_request_reset_it(peer: Peer) -> None:
    stream = peer.open("Echo")
    block = peer.encoder.encode([("some", "trailer")])
    peer.send(HeadersFrame(stream, block, flags=["END_HEADERS"]))
    assert peer.reset_code(stream) == H2ErrorCode.PROTOCOL_ERROR


def test_a_client_that_resets_a_call_cancels_it(server: Server, peer: Peer) -> None:
    for path, begun in (("Hold", server.service.held), ("Wait", server.service.waiting)):
        stream = peer.call(path, path.encode())
        begun.get(timeout=DEADLINE)
        peer.send(RstStreamFrame(stream, H2ErrorCode.CANCEL))
        assert server.service.cancelled.get(timeout=DEADLINE) == path.encode()
    peer.send(RstStreamFrame(stream, H2ErrorCode.CANCEL))  # once more does no harm
    assert peer.status(peer.call("Echo", b"")) == 0


def test_a_disconnected_client_cancels_its_calls(server: Server, peer: Peer) -> None:
    peer.call("Hold", b"1")
    peer.call("Wait", b"2")
    peer.call("Flood", b"1000000 1000")
    server.service.held.get(timeout=DEADLINE)
    server.service.waiting.get(timeout=DEADLINE)
    peer.until(lambda frame: isinstance(frame, DataFrame))
    peer.close()
    got = {server.service.cancelled.get(timeout=DEADLINE) for _ in range(3)}
    assert got == {b"1", b"2", b"flood"}


def test_a_connection_lost_inside_a_frame_is_removed(server: Server, peer: Peer) -> None:
    stream = peer.open("Echo")
    peer.write(raw(0, 0, stream, bytes(1000))[:500])
    peer.close()
    server.wait_until_alone()


# --- windows


def test_a_response_waits_for_the_window_of_its_stream(server: Server, connect: Connect) -> None:
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 10})
    peer.auto_window = False
    stream = peer.call("Quick", b"x" * 20)
    peer.until(lambda frame: isinstance(frame, DataFrame))
    peer.settle()
    assert [len(f.data) for f in peer.frames if isinstance(f, DataFrame)] == [10]
    peer.send(WindowUpdateFrame(stream, 8))
    peer.send(WindowUpdateFrame(stream, 100))
    rest = peer.until(lambda frame: isinstance(frame, HeadersFrame))
    assert "END_STREAM" in rest.flags
    assert b"".join(f.data for f in peer.frames if isinstance(f, DataFrame)) == grpc_message(
        b"x" * 20
    )


def test_a_response_waits_for_the_window_of_the_connection(
    server: Server, connect: Connect
) -> None:
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 1 << 20})
    peer.auto_window = False
    streams = [peer.call("Quick", bytes(50000)) for _ in range(3)]
    peer.settle()

    def received() -> int:
        return sum(len(f.data) for f in peer.frames if isinstance(f, DataFrame))

    assert received() == 65535
    peer.send(WindowUpdateFrame(0, 1 << 20))
    while sum("END_STREAM" in frame.flags for frame in peer.frames) < len(streams):
        peer.read()
    assert received() == 3 * 50005


def test_a_new_initial_window_reaches_open_streams(server: Server, connect: Connect) -> None:
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    peer.auto_window = False
    stream = peer.call("Quick", b"hello")
    peer.settle()
    assert not any(isinstance(frame, DataFrame) for frame in peer.frames)
    peer.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 3}))
    peer.settle()
    # Three bytes are out; the window of the stream is below zero then.
    peer.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 1}))
    peer.settle()
    assert sum(len(f.data) for f in peer.frames if isinstance(f, DataFrame)) == 3
    peer.send(WindowUpdateFrame(stream, 100))
    peer.until(lambda f: isinstance(f, HeadersFrame) and "END_STREAM" in f.flags)
    assert b"".join(f.data for f in peer.frames if isinstance(f, DataFrame)) == grpc_message(
        b"hello"
    )


def test_frames_keep_to_the_size_that_the_client_takes(server: Server, connect: Connect) -> None:
    for largest in (16384, 40000):
        peer = connect(server, {SettingsFrame.MAX_FRAME_SIZE: largest})
        peer.send(WindowUpdateFrame(0, 1 << 20))
        assert len(peer.answer(peer.call("Echo", bytes(60000)))[1]) == 60005
        sizes = [len(frame.data) for frame in peer.frames if isinstance(frame, DataFrame)]
        assert max(sizes) == largest


def test_streams_share_the_connection_fairly(server: Server, connect: Connect) -> None:
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 1 << 30})
    peer.auto_window = False
    streams = [peer.call("Quick", bytes(400000)) for _ in range(2)]
    peer.settle()
    peer.send(WindowUpdateFrame(0, 300000))
    peer.settle()
    per_stream = [
        sum(len(f.data) for f in peer.frames if isinstance(f, DataFrame) and f.stream_id == stream)
        for stream in streams
    ]
    assert min(per_stream) > 65536


def test_a_slow_reader_stops_the_handler(server: Server, connect: Connect) -> None:
    """The handler can send what the windows, the transport and one queue hold, and no more."""
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    peer.call("Flood", b"10000 10000")
    wait_until(lambda: server.stalled() == 1, "the handler to wait")
    peer.settle()
    assert server.service.sent * 10000 <= LIMITS.max_send_queue + 2 * 10000


def test_a_client_that_reads_nothing_stops_the_handler(server: Server, connect: Connect) -> None:
    """With windows without end, the transport's buffer is what stops it."""
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
    peer.send(WindowUpdateFrame(0, (1 << 31) - 1 - 65535))
    peer.call("Flood", b"100000 10000")  # a gigabyte
    wait_until(lambda: server.stalled() == 1, "the handler to wait")
    assert 0 < server.service.sent < 10000
    peer.close()
    assert server.service.cancelled.get(timeout=DEADLINE) == b"flood"


def test_a_stream_whose_window_overflows_is_reset(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(stream_window=20000)))
    stream = peer.open("Sink")
    for _ in range(4):  # the first of them is taken
        peer.send(DataFrame(stream, grpc_message(bytes(9995))))
    assert peer.reset_code(stream) == H2ErrorCode.FLOW_CONTROL_ERROR
    assert peer.status(peer.call("Echo", b"")) == 0


def test_a_connection_whose_window_overflows_is_closed(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(connection_window=70000)))
    streams = [peer.open("Sink") for _ in range(8)]
    for stream in streams * 2:  # of each the first message is taken
        peer.send(DataFrame(stream, grpc_message(bytes(9995))))
    assert peer.goaway().error_code == H2ErrorCode.FLOW_CONTROL_ERROR


def test_unread_messages_are_not_returned_to_the_window(serve: Serve, connect: Connect) -> None:
    server = serve(ConnectionLimits(stream_window=40000))
    peer = connect(server)
    stream = peer.open("Sink")
    peer.send(*(DataFrame(stream, grpc_message(bytes(9995))) for _ in range(4)))
    peer.settle()

    def granted() -> int:
        return sum(
            frame.window_increment
            for frame in peer.frames
            if isinstance(frame, WindowUpdateFrame) and frame.stream_id == stream
        )

    assert granted() == 0
    server.call(server.service.may_take[0])
    peer.until(lambda frame: isinstance(frame, WindowUpdateFrame) and frame.stream_id == stream)
    assert granted() >= 20000
    peer.data(stream, b"", end=True)
    assert peer.answer(stream)[1] == grpc_message(b"4")


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_unread_messages_are_read_in_full_after_reading_resumes(
    serve: Serve, connect: Connect, encoding: str
) -> None:
    """The end of the request waits behind them, and compressed messages are read as others are."""
    server = serve(ConnectionLimits(stream_window=40000))
    peer = connect(server)
    stream = peer.open("Sink", ("grpc-encoding", encoding))
    message = grpc_message(b"plain")
    if encoding == "gzip":
        message += grpc_message(gzip.compress(b"compressed", mtime=0), 1)
    peer.data(stream, message * 3, end=True)
    peer.settle()
    assert not any(isinstance(frame, DataFrame) for frame in peer.frames)
    server.call(server.service.may_take[0])
    assert peer.answer(stream)[1] == grpc_message(b"6" if encoding == "gzip" else b"3")


def test_a_reset_returns_unread_bytes_to_the_window_of_the_connection(
    serve: Serve, connect: Connect
) -> None:
    peer = connect(serve(ConnectionLimits(connection_window=70000)))
    stream = peer.open("Sink")
    sent = [DataFrame(stream, grpc_message(bytes(9995))) for _ in range(5)]
    peer.send(*sent[:1])  # is taken, and acknowledged
    peer.settle()
    peer.send(*sent[1:])
    peer.settle()

    def increments() -> list[int]:
        return [
            frame.window_increment
            for frame in peer.frames
            if isinstance(frame, WindowUpdateFrame) and frame.stream_id == 0
        ]

    assert increments() == [70000 - 65535]
    peer.send(RstStreamFrame(stream, 8))
    peer.settle()
    assert increments() == [70000 - 65535, 50000]


def test_a_message_larger_than_the_window_comes_through(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(stream_window=10000)))
    peer.until(lambda frame: isinstance(frame, SettingsFrame) and "ACK" in frame.flags)
    for path in ("Echo", "EchoStream"):
        stream, window = peer.open(path), 10000
        left = memoryview(grpc_message(bytes(100000)))
        while left:
            while not window:
                frame = peer.read()
                if isinstance(frame, WindowUpdateFrame) and frame.stream_id == stream:
                    window += frame.window_increment
            size = min(window, len(left), 4000)
            peer.send(DataFrame(stream, bytes(left[:size])))
            left, window = left[size:], window - size
        peer.data(stream, b"", end=True)
        assert len(peer.answer(stream)[1]) == 100005


# --- too much of something


def test_streams_beyond_the_limit_are_refused(serve: Serve, connect: Connect) -> None:
    server = serve(ConnectionLimits(max_streams=3))
    peer = connect(server)
    held = [peer.call("Hold", b"") for _ in range(3)]
    refused = peer.call("Hold", b"")
    assert peer.reset_code(refused) == H2ErrorCode.REFUSED_STREAM
    work = [server.service.held.get(timeout=DEADLINE) for _ in held]
    server.call(work[0].done, b"done")
    assert peer.answer(held[0])[1] == grpc_message(b"done")
    assert peer.status(peer.call("Echo", b"")) == 0


def test_rapid_resets_end_the_connection(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(reset_rate=(50, 0))))
    for _ in range(60):
        stream = peer.open("Wait")
        peer.send(RstStreamFrame(stream, H2ErrorCode.CANCEL))
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("passed", [True, False], ids=["closed", "not begun"])
def test_resets_of_unknown_streams_count_too(serve: Serve, connect: Connect, passed: bool) -> None:
    peer = connect(serve(ConnectionLimits(reset_rate=(50, 0))))
    stream = peer.call("Echo", b"") if passed else 101
    for _ in range(60):
        peer.send(RstStreamFrame(stream, H2ErrorCode.CANCEL))
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


def test_a_reset_of_a_stream_that_was_never_begun_is_ignored(peer: Peer) -> None:
    """As gRPC's own client sends it for a call that is cancelled before it has left."""
    peer.send(RstStreamFrame(7, H2ErrorCode.CANCEL))
    assert peer.status(peer.call("Echo", b"")) == 0
    peer.send(RstStreamFrame(99, H2ErrorCode.CANCEL))
    assert peer.status(peer.call("Echo", b"")) == 0


def test_stream_errors_count_as_resets(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(reset_rate=(50, 0))))
    for _ in range(60):
        stream = peer.open("Wait")
        peer.write(raw(8, 0, stream, bytes(4)))
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "frame",
    [
        SettingsFrame(0),
        SettingsFrame(0, flags=["ACK"]),
        PingFrame(0, b"12345678", flags=["ACK"]),
        PriorityFrame(1),
        DataFrame(1, b""),
        GoAwayFrame(0),
    ],
    ids=lambda frame: type(frame).__name__ + str(frame.flags),
)
def test_a_flood_of_no_op_frames_ends_the_connection(
    serve: Serve, connect: Connect, frame: Frame
) -> None:
    peer = connect(serve(ConnectionLimits(no_op_frame_rate=(100, 1))))
    peer.open("Wait")
    peer.write(frame.serialize() * 200)
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


def test_unread_control_frames_end_the_connection(serve: Serve, connect: Connect) -> None:
    limits = ConnectionLimits(
        write_buffer=100000, max_unsent_control=1000, no_op_frame_rate=(1 << 30, 1)
    )
    server = serve(limits)
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
    peer.send(WindowUpdateFrame(0, (1 << 31) - 1 - 65535))
    peer.call("Hold", b"held")
    server.service.held.get(timeout=DEADLINE)
    peer.call("Flood", b"100000 10000")
    wait_until(lambda: server.stalled() == 1, "the flood to be too much")

    def given_up() -> bool:
        peer.send(*[SettingsFrame(0)] * 100)
        return not server.service.cancelled.empty()

    wait_until(given_up, "the connection to be ended")
    cancelled = {server.service.cancelled.get(timeout=DEADLINE) for _ in range(2)}
    assert cancelled == {b"held", b"flood"}


def test_a_flood_of_unknown_frames_ends_the_connection(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(no_op_frame_rate=(100, 1))))
    peer.write(raw(0x77, 0, 0, b"?") * 200)
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 100])
def test_a_flood_of_continuation_frames_ends_the_connection(
    serve: Serve, connect: Connect, size: int
) -> None:
    peer = connect(serve(ConnectionLimits(max_header_block=1000, max_continuations=20)))
    peer.send(HeadersFrame(1, b""))
    peer.send(*[ContinuationFrame(1, bytes(size))] * 30)
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


def test_a_header_block_that_is_too_large(peer: Peer) -> None:
    peer.write(raw(1, 4, 1, bytes(LIMITS.max_header_block + 1)))
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


def test_a_header_list_that_becomes_too_large(peer: Peer) -> None:
    """A small block that stands for a large list."""
    block = peer.block("Echo", ("a", "b" * 3000)) + b"\xbe" * 1000
    peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
    assert peer.goaway().error_code == H2ErrorCode.COMPRESSION_ERROR


def test_a_connection_that_its_client_has_reset_can_be_closed(
    serve: Serve, connect: Connect
) -> None:
    """The client's machine answers the GOAWAY with a reset, as its socket is closed."""
    server = serve(loop=asyncio.new_event_loop())
    peer = connect(server)
    peer.settle()

    def close_both() -> None:
        (connection,) = server.frontend._connections
        peer.socket.close()
        connection.close()

    server.call(close_both)
    server.wait_until_alone()

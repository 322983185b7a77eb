"""Rules of RFC 9113 one by one, by section: frames by hand, and the library h2 as a judge."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence

import h2.config
import h2.connection
import h2.events
import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
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

REQUIRED = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Test/Echo"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def serves_on(peer: Peer, stream: int = -1) -> bool:
    """Whether the connection has survived."""
    peer.next_stream = max(peer.next_stream, stream + 2)
    return peer.status(peer.call("Echo", b"")) == 0


# --- 3.3 and 3.4: how it begins


@pytest.mark.parametrize(
    "beginning",
    [
        b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        PREFACE[:-1] + b"x",
        PREFACE + raw(1, 5, 1, b"\x82"),
        PREFACE + raw(0, 0, 0, b""),
    ],
    ids=["an upgrade", "another preface", "headers first", "data first"],
)
def test_a_connection_must_begin_with_the_preface(
    server: Server, connect: Connect, beginning: bytes
) -> None:
    peer = connect(server, greet=False)
    peer.write(beginning)
    assert peer.goaway().error_code == H2ErrorCode.PROTOCOL_ERROR
    assert peer.ended()
    assert b"101 " not in peer.buffer


# --- 4.1, 5.1.1, 5.3, 5.5, 6.x: frames and fields that are ignored


IGNORED = {
    "the reserved bit of a stream": raw(8, 0, 1 << 31, b"\0\0\0\1"),
    "the reserved bit of a window": raw(8, 0, 0, b"\x80\0\0\1"),
    "flags without a meaning": raw(6, 0xFE, 0, b"12345678"),
    "a setting that missing knows": raw(4, 0, 0, struct.pack(">HI", 0xFFF0, 9)),
    "a priority of an idle stream": raw(2, 0, 99, bytes(5)),
    "a priority of itself": raw(2, 0, 99, struct.pack(">IB", 99, 1)),
    "goaway with an error that missing knows": raw(7, 0, 0, struct.pack(">II", 0, 0xFFFF)),
    "a frame that missing knows on an even stream": raw(0xF0, 0xFF, 2, b"x"),
    "an answer to a ping that was not": raw(6, 1, 0, b"whatever"),
    "an initial window of nothing and back": raw(4, 0, 0, struct.pack(">HI", 4, 0))
    + raw(4, 0, 0, struct.pack(">HI", 4, 65535)),
}


@pytest.mark.parametrize("name", IGNORED)
def test_frames_without_effect_are_ignored(peer: Peer, name: str) -> None:
    peer.write(IGNORED[name])
    assert serves_on(peer)


def test_header_blocks_use_the_dynamic_table(peer: Peer) -> None:
    """An error in RFC 7540, where there were priorities."""
    block = struct.pack(">IB", 1, 255) + peer.block("Echo")
    peer.write(raw(1, 0x24, 1, block))
    peer.data(1, grpc_message(b""), end=True)
    assert peer.status(1) == 0
    assert serves_on(peer, 1)


@pytest.mark.parametrize(
    "frame",
    [
        lambda stream: RstStreamFrame(stream, H2ErrorCode.CANCEL),
        lambda stream: WindowUpdateFrame(stream, 1),
        PriorityFrame,
    ],
    ids=["a reset", "a window update", "a priority"],
)
def test_late_frames_of_an_ended_stream_are_ignored(
    peer: Peer, frame: Callable[[int], Frame]
) -> None:
    stream = peer.call("Echo", b"")
    peer.answer(stream)
    peer.send(frame(stream))
    assert serves_on(peer)


# --- 4.2, 5.1, 5.1.1, 6.x: what ends the connection, after a stream with a higher number


LATE = {
    "an even stream": (raw(1, 5, 4, b"\x82"), H2ErrorCode.PROTOCOL_ERROR),
    "a stream that was passed over": (raw(1, 5, 3, b"\x82"), H2ErrorCode.STREAM_CLOSED),
    "data on a stream of ours": (raw(0, 0, 4, b"x"), H2ErrorCode.PROTOCOL_ERROR),
    "a reset of a stream of ours": (raw(3, 0, 4, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "room for a stream of ours": (raw(8, 0, 4, b"\0\0\0\1"), H2ErrorCode.PROTOCOL_ERROR),
    "no room for a stream of ours": (raw(8, 0, 4, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "a large ping": (raw(6, 0, 0, bytes(9)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a large reset": (raw(3, 0, 5, bytes(5)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a small window update of a stream": (raw(8, 0, 5, bytes(3)), H2ErrorCode.FRAME_SIZE_ERROR),
    "padding as long as its frame": (raw(0, 8, 5, b"\x04abc"), H2ErrorCode.PROTOCOL_ERROR),
    "settings of five bytes": (raw(4, 0, 0, bytes(5)), H2ErrorCode.FRAME_SIZE_ERROR),
    "a window of 2^31": (raw(8, 0, 0, b"\x7f\xff\xff\xff"), H2ErrorCode.FLOW_CONTROL_ERROR),
    "a push of nothing": (raw(5, 4, 0, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
    "a continuation without a stream": (raw(9, 4, 0, b""), H2ErrorCode.PROTOCOL_ERROR),
    "a continuation after the end of a block": (raw(9, 4, 5, b""), H2ErrorCode.PROTOCOL_ERROR),
    "a block inside of a block": (
        raw(1, 0, 7, b"\x82") + raw(1, 4, 9, b"\x82"),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "an unknown frame inside of a block": (
        raw(1, 0, 7, b"\x82") + raw(0xF0, 0, 7, b""),
        H2ErrorCode.PROTOCOL_ERROR,
    ),
    "a table larger than was allowed": (
        raw(1, 4, 7, b"\x3f\xe2\x1f"),
        H2ErrorCode.COMPRESSION_ERROR,
    ),
    "a size of the table too late": (raw(1, 4, 7, b"\x82\x20"), H2ErrorCode.COMPRESSION_ERROR),
    "an index of zero": (raw(1, 4, 7, b"\x80"), H2ErrorCode.COMPRESSION_ERROR),
    "a name that is cut off": (raw(1, 4, 7, b"\x00\x0aab"), H2ErrorCode.COMPRESSION_ERROR),
    "trailers that cannot be decoded": (raw(1, 5, 5, b"\xfe"), H2ErrorCode.COMPRESSION_ERROR),
}


@pytest.mark.parametrize("name", LATE)
def test_connection_errors_with_open_streams(server: Server, peer: Peer, name: str) -> None:
    data, code = LATE[name]
    peer.next_stream = 5
    stream = peer.open("Wait")
    peer.write(data)
    frame = peer.goaway()
    assert (frame.error_code, frame.last_stream_id >= stream) == (code, True)
    assert peer.ended()


def test_a_new_initial_window_must_not_make_one_too_large(server: Server, peer: Peer) -> None:
    """6.9.2: a stream has grown its own before."""
    stream = peer.call("Hold", b"")
    server.service.held.get(timeout=DEADLINE)
    peer.send(WindowUpdateFrame(stream, (1 << 31) - 1 - 65535))
    peer.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65536}))
    assert peer.goaway().error_code == H2ErrorCode.FLOW_CONTROL_ERROR


def test_a_window_may_become_negative(server: Server, connect: Connect) -> None:
    """6.9.2: a smaller window takes granted bytes back; nothing is sent until the window is
    positive.
    """
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 100})
    peer.auto_window = False
    stream = peer.call("Echo", bytes(150))
    peer.until(lambda frame: isinstance(frame, DataFrame))
    peer.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 20}))
    peer.send(WindowUpdateFrame(stream, 80))
    peer.settle()
    sent = [len(f.data) for f in peer.frames if isinstance(f, DataFrame)]
    assert sent == [100]
    peer.send(WindowUpdateFrame(stream, 55))
    frame = peer.until(lambda frame: isinstance(frame, DataFrame))
    assert isinstance(frame, DataFrame) and len(frame.data) == 55


# --- 8.1, 8.2, 8.3: what makes a request malformed


def _without(name: str) -> list[tuple[str, str]]:
    return [field for field in REQUIRED if field[0] != name]


MALFORMED = {
    "no method": _without(":method"),
    "no scheme": _without(":scheme"),
    "no path": _without(":path"),
    "a status": [(":status", "200"), *REQUIRED],
    "connect as if it were a request": [(":method", "CONNECT"), (":authority", "x:1")],
    "an empty method": [(":method", ""), *_without(":method")],
    "an empty name": [*REQUIRED, ("", "x")],
    "a name with a colon": [*REQUIRED, ("a:b", "x")],
    "a name that is not ASCII": [*REQUIRED, ("caf\u00e9", "x")],
    "a name with a control character": [*REQUIRED, ("a\x7f", "x")],
    "a value with a zero": [*REQUIRED, ("a", "b\0c")],
    "a value with a carriage return": [*REQUIRED, ("a", "b\rc")],
    "transfer-encoding": [*REQUIRED, ("transfer-encoding", "chunked")],
    "upgrade": [*REQUIRED, ("upgrade", "h2c")],
    "keep-alive": [*REQUIRED, ("keep-alive", "1")],
    "proxy-connection": [*REQUIRED, ("proxy-connection", "close")],
    "a content-length that is no number": [*REQUIRED, ("content-length", "five")],
    "a negative content-length": [*REQUIRED, ("content-length", "-1")],
    "a content-length beyond all": [*REQUIRED, ("content-length", "9" * 5000)],
    "two lengths": [*REQUIRED, ("content-length", "5"), ("content-length", "6")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_reset(peer: Peer, name: str) -> None:
    block = peer.encoder.encode(MALFORMED[name])
    peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
    assert peer.reset_code(1) == H2ErrorCode.PROTOCOL_ERROR
    assert serves_on(peer, 1)


TRAILERS = {
    "a pseudo-header": [(":path", "/")],
    "an upper-case name": [("Trailer", "x")],
    "a line break": [("trailer", "a\nb")],
    "a field of connections": [("connection", "close")],
}


@pytest.mark.parametrize("name", TRAILERS)
def test_malformed_trailers_reset_a_request(peer: Peer, name: str) -> None:
    stream = peer.open("Echo")
    peer.data(stream, grpc_message(b""))
    block = peer.encoder.encode(TRAILERS[name])
    peer.send(HeadersFrame(stream, block, flags=["END_HEADERS", "END_STREAM"]))
    assert peer.reset_code(stream) == H2ErrorCode.PROTOCOL_ERROR
    assert serves_on(peer)


@pytest.mark.parametrize("path", ["Echo", "EchoStream"])
@pytest.mark.parametrize("length, parts", [(9, [10]), (9, [5, 5]), (11, [10]), (11, [4, 6])])
def test_a_request_that_differs_from_its_content_length_is_reset(
    peer: Peer, path: str, length: int, parts: list[int]
) -> None:
    """8.1.1: DATA of ten bytes in all."""
    data = grpc_message(b"hello")
    stream = peer.open(path, ("content-length", str(length)))
    peer.data(stream, data[: parts[0]], end=len(parts) == 1)
    if len(parts) > 1:
        peer.data(stream, data[parts[0] :], end=True)
    assert peer.reset_code(stream) == H2ErrorCode.PROTOCOL_ERROR
    assert serves_on(peer)


@pytest.mark.parametrize("path", ["Echo", "EchoStream"])
def test_padding_and_trailers_do_not_count_as_content(peer: Peer, path: str) -> None:
    data = grpc_message(b"hello")
    stream = peer.open(path, ("content-length", "10"), ("content-length", "10"))
    peer.send(DataFrame(stream, data, pad_length=5, flags=["PADDED"]))
    block = peer.encoder.encode([("some", "trailer")])
    peer.send(HeadersFrame(stream, block, flags=["END_HEADERS", "END_STREAM"]))
    assert peer.answer(stream)[1] == data


@pytest.mark.parametrize("end", [True, False])
def test_a_request_without_its_announced_content_is_reset(peer: Peer, end: bool) -> None:
    stream = peer.open("Echo", ("content-length", "10"), end=end)
    if not end:
        block = peer.encoder.encode([("some", "trailer")])
        peer.send(HeadersFrame(stream, block, flags=["END_HEADERS", "END_STREAM"]))
    assert peer.reset_code(stream) == H2ErrorCode.PROTOCOL_ERROR


def test_spaces_around_metadata_pass_as_grpcio_sends_them(server: Server, peer: Peer) -> None:
    """Against 8.2.1 on purpose: gRPC clients do not strip them, and grpcio takes them."""
    assert peer.status(peer.call("Echo", b"", ("x", " a "))) == 0
    assert ("x", " a ") in server.service.metadata.get(timeout=DEADLINE)


# --- the library h2 has nothing against what the server sends


class Judge:
    """A client whose every received byte is checked by the library's state machines."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.http.initiate_connection()
        self.ends: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = {}
        self.resets: dict[int, int] = {}
        self.terminated: int | None = None

    def call(self, path: str, data: bytes, end: bool = True, **extra: str) -> int:
        stream = self.http.get_next_available_stream_id()
        fields = [(name, value) for name, value in REQUIRED if name != ":path"]
        metadata = [(name.replace("_", "-"), value) for name, value in extra.items()]
        self.http.send_headers(
            stream, [(":path", f"/test.Test/{path}"), (":authority", "x"), *fields, *metadata]
        )
        for at in range(0, len(data), 16384):
            self.http.send_data(stream, data[at : at + 16384])
        if end:
            self.http.end_stream(stream)
        return stream

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.socket.sendall(self.http.data_to_send())
            data = self.socket.recv(65536)
            assert data, "the connection ended"
            for event in self.http.receive_data(data):
                self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
            self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            self.ends.setdefault(event.stream_id, {}).update(
                {str(name): str(value) for name, value in event.headers or ()}
            )
        elif isinstance(event, h2.events.StreamReset):
            self.resets[event.stream_id] = int(event.error_code)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.terminated = int(event.error_code or 0)

    def status(self, stream: int) -> str:
        self.until(lambda: "grpc-status" in self.ends.get(stream, {}))
        return self.ends[stream]["grpc-status"]


def test_the_h2_library_accepts_all_frames(server: Server) -> None:
    judge = Judge(server.port)
    body = grpc_message(b"hello")
    calls = {
        judge.call("Echo", body): "0",
        judge.call("EchoStream", body * 3): "0",
        judge.call("Flood", grpc_message(b"50 5000")): "0",
        judge.call("Fail", grpc_message(b"x" * 20000)): "5",
        judge.call("Nothing", body): "12",
        judge.call("Echo", b"", end=True): "13",
        judge.call("Echo", grpc_message(b"x" * 30000), content_length="30005"): "0",
        judge.call("Wait", body, grpc_timeout="20m"): "4",
        judge.call("EchoStream", grpc_message(b"", 1)): "13",
    }
    for stream, status in calls.items():
        assert judge.status(stream) == status
    early = judge.call("Nothing", body, end=False)
    assert judge.status(early) == "12"
    judge.until(lambda: early in judge.resets)
    assert judge.resets[early] == H2ErrorCode.NO_ERROR
    judge.socket.close()


# --- too much, or too slow


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], PREFACE, PREFACE + b"\0\0\6\4\0\0\0\0\0\0"])
def test_an_incomplete_request_head_times_out(serve: Serve, connect: Connect, sent: bytes) -> None:
    server = serve(ConnectionLimits(handshake_timeout=0.05))
    peer = connect(server, greet=False)
    peer.write(sent)
    assert peer.ended()
    server.wait_until_alone()


def test_streams_without_a_window_stop_their_handlers(serve: Serve, connect: Connect) -> None:
    """Each may leave that many bytes, and then waits: a stall of many streams has a bound."""
    server = serve(ConnectionLimits(max_send_queue=10000, max_streams=50))
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    for _ in range(50):
        peer.call("Flood", b"1000 5000")
    wait_until(lambda: server.stalled() == 50, "the handlers to fill their queues")
    peer.settle()
    (connection,) = server.frontend._connections
    assert [stream.pending_bytes for stream in connection.streams.values()] == [2 * 5005] * 50
    assert not [frame for frame in peer.frames if isinstance(frame, DataFrame)]
    refused = peer.call("Flood", b"1 1")
    assert peer.reset_code(refused) == H2ErrorCode.REFUSED_STREAM
    peer.close()
    for _ in range(50):
        assert server.service.cancelled.get(timeout=DEADLINE) == b"flood"


def test_a_flood_of_pings_ends_the_connection(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(no_op_frame_rate=(100, 1))))
    peer.send(*[PingFrame(0, b"12345678")] * 200)
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


def change_window(sizes: Sequence[int]) -> bytes:
    """A SETTINGS frame that changes INITIAL_WINDOW_SIZE several times."""
    payload = b"".join(struct.pack(">HI", 4, size) for size in sizes)
    return raw(4, 0, 0, payload)


def test_window_changes_cost_more_with_more_open_streams(serve: Serve, connect: Connect) -> None:
    """Each one changes the window of every stream, so a small frame may be much work."""
    server = serve(ConnectionLimits(no_op_frame_rate=(100, 1), max_streams=1000))
    peer = connect(server)
    for _ in range(640):
        peer.open("EchoStream")
    for turn in range(20):  # 11 tokens each
        peer.write(change_window([70000 + turn]))
    assert peer.goaway().error_code == H2ErrorCode.ENHANCE_YOUR_CALM


def test_only_the_last_window_of_a_frame_counts(serve: Serve, connect: Connect) -> None:
    server = serve(ConnectionLimits(no_op_frame_rate=(100, 1), max_streams=1000))
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    for _ in range(640):
        peer.open("EchoStream")
    waiting = peer.call("Echo", b"hello")
    for _ in range(20):  # 1 token each, as the window is the same in the end
        peer.write(change_window([5, 0] * 32))
    peer.settle()
    assert not [frame for frame in peer.frames if isinstance(frame, DataFrame)]
    peer.write(change_window([0, 70000]))
    assert peer.answer(waiting)[1] == grpc_message(b"hello")

"""gRPC on the wire: requests that are not, statuses, deadlines, compression, metadata."""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.methods import GrpcOptions
from tests.conftest import DEADLINE, wait_until
from tests.unit.host.frontends.grpc.h2.h2_peer import (
    Connect,
    Peer,
    Serve,
    Server,
    grpc_message,
)
from tests.waiting import FakeClockLoop


def plain(peer: Peer, *fields: tuple[str, str]) -> dict[str, str]:
    """The answer to a request with these fields."""
    peer.send(HeadersFrame(1, peer.encoder.encode(fields), flags=["END_HEADERS", "END_STREAM"]))
    return peer.answer(1)[2]


HTTP = ((":method", "POST"), (":scheme", "http"), (":path", "/test.Test/Echo"))
GRPC = ("content-type", "application/grpc")
TE = ("te", "trailers")


@pytest.mark.parametrize("content_type", ["text/html", "", "application/grpc-web", "application"])
def test_another_content_type_is_refused(peer: Peer, content_type: str) -> None:
    assert plain(peer, *HTTP, TE, ("content-type", content_type)) == {":status": "415"}


@pytest.mark.parametrize("suffix", ["", "+proto", "; charset=utf-8"])
def test_every_content_type_of_grpc_is_accepted(peer: Peer, suffix: str) -> None:
    fields = [*HTTP, TE, ("content-type", f"application/grpc{suffix}")]
    peer.send(HeadersFrame(1, peer.encoder.encode(fields), flags=["END_HEADERS"]))
    peer.data(1, grpc_message(b"hello"), end=True)
    assert peer.status(1) == 0


def test_another_method_is_refused(peer: Peer) -> None:
    assert plain(peer, (":method", "GET"), *HTTP[1:], TE, GRPC) == {":status": "405"}


def test_the_te_header_is_required(peer: Peer) -> None:
    trailers = plain(peer, *HTTP, GRPC)
    assert trailers["grpc-status"] == "13"
    assert trailers["grpc-message"] == ("expected the header 'te: trailers', as gRPC asks for it")


@pytest.mark.parametrize("path", ["/test.Test/No", "/No/Echo", "/", "/test.Test/Echo/"])
def test_an_unknown_method_is_unimplemented(peer: Peer, path: str) -> None:
    _, body, trailers = peer.answer(peer.call(path, b"hello"))
    assert (body, trailers["grpc-status"]) == (b"", "12")
    assert trailers["grpc-message"] == f"Method not found: {path}"


def test_an_early_error_tells_the_client_to_stop_sending(peer: Peer) -> None:
    stream = peer.open("No")
    assert peer.status(stream) == 12
    assert peer.reset_code(stream) == 0
    peer.data(stream, bytes(100000), end=True)  # was on its way
    assert peer.status(peer.call("Echo", b"")) == 0


def test_too_much_metadata_is_refused(peer: Peer) -> None:
    stream = peer.call("Echo", b"", *((f"key-{number}", "x" * 100) for number in range(120)))
    trailers = peer.answer(stream)[2]
    assert trailers["grpc-status"] == "8"
    assert trailers["grpc-message"].startswith("received metadata of ")
    assert peer.status(peer.call("Echo", b"")) == 0


def test_a_handlers_error_becomes_the_status(peer: Peer) -> None:
    text = "no such thing: ü\n100%\U0001f600"
    trailers = peer.answer(peer.call("Fail", text.encode()))[2]
    assert trailers[":status"] == "200"
    assert trailers["grpc-status"] == "5"
    assert trailers["grpc-message"] == "no such thing: %C3%BC%0A100%25%F0%9F%98%80"


@pytest.mark.parametrize("text", [" between ", " ", "  "])
def test_spaces_at_the_ends_of_a_text_are_escaped(peer: Peer, text: str) -> None:
    """Fields of HTTP neither begin nor end with spaces (RFC 9113, 8.2.1): proxies cut these."""
    message = peer.answer(peer.call("Fail", text.encode()))[2]["grpc-message"]
    assert message == message.strip()
    assert unquote(message) == text


def test_a_long_text_takes_several_frames(server: Server, connect: Connect) -> None:
    peer = connect(server)
    peer.decoder.max_header_list_size = 1 << 20
    trailers = peer.answer(peer.call("Fail", b"x" * 50000))[2]
    assert trailers["grpc-message"] == "x" * 50000


def test_a_status_message_is_cut_to_the_clients_header_list_limit(
    server: Server, connect: Connect
) -> None:
    peer = connect(server, {SettingsFrame.MAX_HEADER_LIST_SIZE: 8192})
    trailers = peer.answer(peer.call("Fail", ("ü" * 20000).encode()))[2]
    text = trailers["grpc-message"]
    assert 3800 < len(text) <= 4096 - 32 - len("grpc-message")
    assert set(unquote(text, errors="strict")) == {"ü"}


@pytest.mark.parametrize("path", ["Echo", "Quick", "EchoStream"])
def test_messages_of_any_size_are_echoed(peer: Peer, path: str) -> None:
    for size in (0, 1, 4090, 4096, 16384, 65536, 1 << 20):
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        assert peer.answer(peer.call(path, data))[1:] == (
            grpc_message(data),
            {"grpc-status": "0"},
        )


def test_a_message_may_come_in_pieces(peer: Peer) -> None:
    message = grpc_message(bytes(range(200)))
    for path in ("Echo", "EchoStream"):
        for step in (1, 3, 6, 100):
            stream = peer.open(path)
            for position in range(0, len(message), step):
                peer.data(stream, message[position : position + step])
            peer.data(stream, b"", end=True)
            assert peer.answer(stream)[1] == message


def test_messages_of_a_stream_may_share_frames(peer: Peer) -> None:
    messages = b"".join(grpc_message(bytes([number]) * number) for number in range(200))
    stream = peer.open("EchoStream")
    peer.data(stream, messages, end=True)
    assert peer.answer(stream)[1] == messages


@pytest.mark.parametrize(
    "path, data, text",
    [
        ("Echo", b"", "a unary call ended without a whole message"),
        ("Echo", grpc_message(b"hello")[:-1], "a unary call ended without a whole message"),
        ("Echo", grpc_message(b"1") + grpc_message(b"2"), "more than one message in a unary call"),
        ("Echo", grpc_message(b"1") + b"\0", "more than one message in a unary call"),
        ("EchoStream", b"\0\0", "the stream ended inside of a message"),
        ("EchoStream", grpc_message(b"hello")[:-1], "the stream ended inside of a message"),
    ],
)
def test_malformed_grpc_messages_are_rejected(
    peer: Peer, path: str, data: bytes, text: str
) -> None:
    stream = peer.open(path)
    peer.data(stream, data, end=True)
    trailers = peer.answer(stream)[2]
    assert (trailers["grpc-status"], trailers["grpc-message"]) == ("13", text)


@pytest.mark.parametrize("path", ["Echo", "EchoStream"])
def test_a_message_that_is_too_large_is_refused_by_its_length(
    serve: Serve, connect: Connect, path: str
) -> None:
    peer = connect(serve(ConnectionLimits(max_message_size=1000)))
    stream = peer.open(path)
    peer.data(stream, b"\0\0\0\3\xe9")  # 1001 bytes are to come
    trailers = peer.answer(stream)[2]
    assert trailers["grpc-status"] == "8"
    assert trailers["grpc-message"] == "Received message larger than max (1001 vs. 1000)"
    assert peer.status(peer.call(path, bytes(1000))) == 0


# --- deadlines


@pytest.mark.parametrize("path", ["Wait", "Hold", "Flood"])
@pytest.mark.parametrize("timeout", ["20m", "20000u", "0S"])
def test_a_call_ends_at_its_deadline(
    serve: Serve, connect: Connect, clock: FakeClockLoop, path: str, timeout: str
) -> None:
    server = serve(loop=clock)
    peer = connect(server)
    stream = peer.open(path, ("grpc-timeout", timeout))
    peer.data(stream, grpc_message(b"1 1" if path == "Flood" else b"me"))
    if path != "Flood":
        peer.data(stream, b"", end=True)
    if timeout != "0S":
        if path == "Flood":
            peer.until(lambda frame: isinstance(frame, DataFrame))
        elif path == "Wait":
            server.service.waiting.get(timeout=DEADLINE)
        else:
            server.service.held.get(timeout=DEADLINE)
        clock.advance_from_thread(0.03)
    trailers = peer.answer(stream)[2]
    assert (trailers["grpc-status"], trailers["grpc-message"]) == ("4", "Deadline Exceeded")
    if timeout != "0S":
        expected = b"flood" if path == "Flood" else b"me"
        assert server.service.cancelled.get(timeout=DEADLINE) == expected


def test_each_call_ends_at_its_own_deadline(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    server = serve(loop=clock)
    peer = connect(server)
    streams = {}
    for timeout in ("300m", "100m", "9S", "200m", "100m"):
        streams[peer.call("Wait", timeout.encode(), ("grpc-timeout", timeout))] = timeout
        server.service.waiting.get(timeout=DEADLINE)
    lasting = peer.call("Wait", b"no deadline")
    quick = [peer.call("Echo", b"", ("grpc-timeout", "50m")) for _ in range(2)]
    assert [peer.status(stream) for stream in quick] == [0, 0]
    for expected in (["100m", "100m"], ["200m"], ["300m"]):
        clock.advance_from_thread(0.1)
        ended = [peer.until(lambda frame: isinstance(frame, HeadersFrame)) for _ in expected]
        assert [streams[frame.stream_id] for frame in ended] == expected
        peer.settle()
    clock.advance_from_thread(8)
    peer.settle()
    assert server.run(open_streams(server)) == [5, lasting]
    clock.advance_from_thread(2)
    assert peer.status(5) == 4


async def open_streams(server: Server) -> list[int]:
    (connection,) = server.frontend._connections
    return list(connection.streams)


def test_a_deadline_of_a_client_that_does_not_read(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    server = serve(loop=clock)
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    stream = peer.call("Flood", b"1000 10000", ("grpc-timeout", "100m"))
    wait_until(lambda: server.stalled() == 1, "the handler to wait")
    clock.advance_from_thread(0.2)
    assert peer.reset_code(stream) == 8
    assert server.service.cancelled.get(timeout=DEADLINE) == b"flood"


@pytest.mark.parametrize("path", ["Echo", "Quick"])
def test_a_deadline_drops_a_unary_response_that_is_not_read(
    serve: Serve, connect: Connect, clock: FakeClockLoop, path: str
) -> None:
    server = serve(loop=clock)
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    stream = peer.call(path, bytes(1 << 20), ("grpc-timeout", "100m"))
    wait_until(lambda: server.stalled() == 1, "the response to wait")
    clock.advance_from_thread(0.05)
    peer.settle()
    assert server.stalled() == 1
    clock.advance_from_thread(0.1)
    assert peer.reset_code(stream) == 8  # CANCEL
    assert server.stalled() == 0


@pytest.mark.parametrize("grant", [0, 1000])
def test_a_unary_response_without_deadline_waits_one_interval_for_its_reader(
    serve: Serve, connect: Connect, clock: FakeClockLoop, grant: int
) -> None:
    server = serve(ConnectionLimits(data_rate_interval=60), loop=clock)
    peer = connect(server, {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    peer.auto_window = False
    stream = peer.call("Echo", bytes(1 << 20))
    wait_until(lambda: server.stalled() == 1, "the response to wait")
    clock.advance_from_thread(61)
    if grant:
        peer.send(WindowUpdateFrame(stream, grant))
        peer.until(lambda frame: isinstance(frame, DataFrame))
        clock.advance_from_thread(60)
        peer.settle()
        assert server.stalled() == 1
    clock.advance_from_thread(60)
    assert peer.reset_code(stream) == 8  # CANCEL
    assert server.stalled() == 0


def test_a_deadline_does_not_affect_calls_that_finish_in_time(server: Server, peer: Peer) -> None:
    streams = [peer.call("Echo", b"", ("grpc-timeout", unit)) for unit in ("9H", "9M", "999999S")]
    assert [peer.status(stream) for stream in streams] == [0, 0, 0]


@pytest.mark.parametrize("value", ["", "5", "S", "-1S", "123456789S", "5 S", "5s"])
def test_invalid_grpc_timeouts_are_rejected(peer: Peer, value: str) -> None:
    trailers = peer.answer(peer.call("Echo", b"", ("grpc-timeout", value)))[2]
    assert trailers["grpc-status"] == "13"
    assert trailers["grpc-message"] == (
        f"grpc-timeout '{value}' is not up to 8 digits and one of H M S m u n"
    )


# --- metadata


def test_metadata_are_passed_on_with_binary_values_decoded(server: Server, peer: Peer) -> None:
    bare = base64.b64encode(b"\0\xff!").decode().rstrip("=")
    fields = [("a", "1"), ("a", "2"), ("b-bin", bare), ("c-bin", "AA==,AQ==")]
    assert peer.status(peer.call("Echo", b"", *fields, ("grpc-timeout", "9S"))) == 0
    assert server.service.metadata.get(timeout=DEADLINE) == [
        ("a", "1"),
        ("a", "2"),
        ("b-bin", b"\0\xff!"),
        ("c-bin", b"\0,\1"),
    ]


def test_the_metadata_of_each_call_are_its_own(server: Server, peer: Peer) -> None:
    """However often header blocks repeat, and whatever the table does meanwhile."""
    for number in [1, 1, 2, 1, 2, 2, *range(60), *range(60), 3, 3]:
        field = ("number", f"{number}" + "x" * (number * 4))
        peer.call("Echo", b"", field)
        assert server.service.metadata.get(timeout=DEADLINE) == [field]


def test_binary_metadata_that_is_not_base64_is_rejected(peer: Peer) -> None:
    trailers = peer.answer(peer.call("Echo", b"", ("x-bin", "*")))[2]
    assert trailers["grpc-message"] == "metadata 'x-bin' is not in base64"


# --- compression

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("path", ["Echo", "Quick", "EchoStream"])
@pytest.mark.parametrize("encoding", COMPRESS)
@pytest.mark.parametrize("size", [0, 100, 1 << 20])
def test_compressed_requests(
    server: Server, peer: Peer, path: str, encoding: str, size: int
) -> None:
    data = bytes(size)
    stream = peer.open(path, ("grpc-encoding", encoding))
    peer.data(stream, grpc_message(COMPRESS[encoding](data), flag=1), end=True)
    assert peer.answer(stream)[1] == grpc_message(data)


def test_a_message_may_be_plain_although_others_are_compressed(peer: Peer) -> None:
    stream = peer.open("EchoStream", ("grpc-encoding", "gzip"))
    peer.data(
        stream, grpc_message(gzip.compress(b"one", mtime=0), 1) + grpc_message(b"two"), end=True
    )
    assert peer.answer(stream)[1] == grpc_message(b"one") + grpc_message(b"two")


@pytest.mark.parametrize("path", ["Echo", "EchoStream"])
@pytest.mark.parametrize(
    "encoding, data, code, text",
    [
        ("gzip", b"what", 13, "a message is not gzip: "),
        ("deflate", b"what", 13, "a message is not deflate: "),
        (
            "gzip",
            gzip.compress(bytes(100), mtime=0)[:-9],
            13,
            "a message is not gzip: its end is missing",
        ),
        ("identity", b"what", 13, "a message is compressed, but grpc-encoding does not say how"),
        (
            "gzip",
            gzip.compress(bytes(1001), mtime=0),
            8,
            "Received message larger than max (1001 vs. 1000)",
        ),
        ("gzip", gzip.compress(bytes(1 << 24), mtime=0), 8, "Received message larger than max"),
    ],
)
def test_compressed_messages_that_are_refused(
    serve: Serve, connect: Connect, path: str, encoding: str, data: bytes, code: int, text: str
) -> None:
    peer = connect(serve(ConnectionLimits(max_message_size=1000 if len(data) <= 1000 else 1 << 16)))
    stream = peer.open(path, ("grpc-encoding", encoding))
    peer.data(stream, grpc_message(data, 1), end=True)
    trailers = peer.answer(stream)[2]
    assert trailers["grpc-status"] == str(code)
    assert trailers["grpc-message"].startswith(text)


def test_another_encoding_is_unimplemented_and_the_known_ones_are_named(peer: Peer) -> None:
    trailers = peer.answer(peer.call("Echo", b"", ("grpc-encoding", "snappy")))[2]
    assert trailers["grpc-status"] == "12"
    assert trailers["grpc-accept-encoding"] == "identity,deflate,gzip"
    assert trailers["grpc-message"] == (
        "grpc-encoding 'snappy' is not supported, expected identity, deflate or gzip"
    )


@pytest.mark.parametrize("path", ["Echo", "Quick", "EchoStream"])
@pytest.mark.parametrize(
    "level, accepted, encoding",
    [
        ("none", "gzip,deflate", None),
        ("low", "identity, deflate, gzip", "gzip"),
        ("low", "deflate", "deflate"),
        ("medium", "gzip,deflate", "deflate"),
        ("high", "gzip", "gzip"),
        ("high", "identity", None),
        ("high", "", None),
    ],
)
def test_compressed_responses(
    serve: Serve, connect: Connect, path: str, level: str, accepted: str, encoding: str | None
) -> None:
    peer = connect(serve(options=GrpcOptions(compression_level=level)))
    extra = [("grpc-accept-encoding", accepted)] if accepted else []
    for data in (bytes(1000), bytes(1 << 19)):
        head, body, trailers = peer.answer(peer.call(path, data, *extra))
        assert head.get("grpc-encoding") == encoding
        assert trailers["grpc-status"] == "0"
        if encoding:
            assert body[0] == 1 and len(body) < len(data) // 10
            assert (gzip.decompress if encoding == "gzip" else zlib.decompress)(body[5:]) == data
        else:
            assert body == grpc_message(data)


def test_a_stream_that_is_reset_while_its_response_is_compressed_gets_no_frame(
    serve: Serve, connect: Connect
) -> None:
    peer = connect(serve(options=GrpcOptions(compression_level="low")))
    accepts = ("grpc-accept-encoding", "gzip")
    stream = peer.next_stream
    peer.next_stream += 2
    message = grpc_message(bytes(10000))
    peer.send(
        HeadersFrame(stream, peer.block("Quick", accepts), flags=["END_HEADERS"]),
        DataFrame(stream, message, flags=["END_STREAM"]),
        RstStreamFrame(stream, 8),
    )
    for _ in range(3):  # each compressed after the first one
        assert peer.answer(peer.call("Quick", bytes(1 << 18), accepts))[2]["grpc-status"] == "0"
    assert not [frame for frame in peer.frames if frame.stream_id == stream]


def test_messages_that_do_not_shrink_are_sent_uncompressed(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(options=GrpcOptions(compression_level="high")))
    _, body, _ = peer.answer(peer.call("Echo", b"x", ("grpc-accept-encoding", "gzip")))
    assert body == grpc_message(b"x")


# --- streams


def test_a_stream_sends_responses_while_it_receives_requests(peer: Peer) -> None:
    stream = peer.open("EchoStream")
    for number in range(3):
        peer.data(stream, grpc_message(b"%d" % number))
        frame = peer.until(lambda frame: isinstance(frame, DataFrame))
        assert isinstance(frame, DataFrame)
        assert frame.data == grpc_message(b"%d" % number)
    peer.data(stream, b"", end=True)
    assert peer.answer(stream)[2] == {"grpc-status": "0"}


def test_a_stream_may_end_without_messages(peer: Peer) -> None:
    head, body, trailers = peer.answer(peer.open("EchoStream", end=True))
    assert (head, body) == (trailers, b"")
    assert trailers["grpc-status"] == "0"


def test_a_stream_that_ends_early_is_reset(server: Server, peer: Peer) -> None:
    stream = peer.open("EchoStream")
    peer.data(stream, b"\1\0\0\0\1x")  # compressed, without an encoding
    assert peer.status(stream) == 13
    assert peer.reset_code(stream) == 0
    assert not any(isinstance(f, RstStreamFrame) and f.error_code for f in peer.frames)

"""The timers of an HTTP/2 connection, and limits on clients that cost the server much."""

from __future__ import annotations

import select

import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame

from host.frontends.grpc.h2.connection_policy import PingPolicy
from host.frontends.grpc.h2.frames import ConnectionLimits, H2ErrorCode
from host.frontends.grpc.methods import GrpcOptions
from tests.conftest import DEADLINE, wait_until
from tests.unit.host.frontends.grpc.h2.h2_peer import Connect, Peer, Serve, Server, grpc_message
from tests.waiting import FakeClockLoop


def server_ping(peer: Peer) -> PingFrame:
    frame = peer.until(lambda f: isinstance(f, PingFrame) and "ACK" not in f.flags)
    assert isinstance(frame, PingFrame)
    return frame


def answer_ping(peer: Peer, ping: PingFrame) -> None:
    peer.send(PingFrame(0, ping.opaque_data, flags=["ACK"]))


def test_draining_finishes_open_streams_and_refuses_new_ones(server: Server, peer: Peer) -> None:
    before = peer.call("Hold", b"before")
    held = [server.service.held.get(timeout=DEADLINE)]
    stopping = server.start(server.frontend.stop(DEADLINE))
    first = peer.goaway()
    assert (first.error_code, first.last_stream_id) == (0, (1 << 31) - 1)
    ping = server_ping(peer)
    meanwhile = peer.call("Hold", b"meanwhile")  # the client could not know
    held.append(server.service.held.get(timeout=DEADLINE))
    answer_ping(peer, ping)
    assert peer.goaway().last_stream_id == meanwhile
    late = peer.call("Hold", b"late")
    assert peer.reset_code(late) == H2ErrorCode.REFUSED_STREAM
    for work in held:
        server.call(work.done, work.data)
    assert peer.answer(before)[1] == grpc_message(b"before")
    assert peer.answer(meanwhile)[1] == grpc_message(b"meanwhile")
    assert peer.ended()
    peer.close()
    stopping.result(DEADLINE)


def test_draining_does_not_depend_on_the_client(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    """One that never answers the ping is closed all the same."""
    server = serve(ConnectionLimits(linger_timeout=5), loop=clock)
    peer = connect(server)
    peer.settle()
    stopping = server.start(server.frontend.stop(DEADLINE))
    server_ping(peer)
    clock.advance_from_thread(6)
    assert peer.ended()
    clock.advance_from_thread(6)  # it does not close its end either
    stopping.result(DEADLINE)


def test_stopping_answers_slow_requests_with_503(server: Server, peer: Peer) -> None:
    unary, stream, flood = peer.call("Hold", b"1"), peer.open("EchoStream"), peer.open("Wait")
    peer.data(stream, grpc_message(b"x"))
    peer.until(lambda frame: isinstance(frame, DataFrame))
    stopping = server.start(server.frontend.stop(0))
    for one in (unary, stream, flood):
        trailers = peer.answer(one)[2]
        assert trailers["grpc-status"] == "14"
        assert trailers["grpc-message"] == "the server has stopped before it could answer"
    assert server.service.cancelled.get(timeout=DEADLINE) == b"1"
    assert peer.ended()
    peer.close()
    stopping.result(DEADLINE)


def test_a_stopped_server_takes_no_connections(server: Server, connect: Connect) -> None:
    server.run(server.frontend.stop(0))
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_an_old_connection_is_drained(serve: Serve, connect: Connect, clock: FakeClockLoop) -> None:
    server = serve(options=GrpcOptions(max_connection_age=50), loop=clock)
    peer = connect(server)
    stream = peer.call("Hold", b"old")
    work = server.service.held.get(timeout=DEADLINE)
    clock.advance_from_thread(0.04)  # not yet
    peer.settle()
    assert not any(isinstance(f, GoAwayFrame) for f in peer.frames)
    clock.advance_from_thread(0.02)
    frame = peer.goaway()
    assert (frame.error_code, frame.additional_data) == (0, b"max_age")
    answer_ping(peer, server_ping(peer))
    peer.goaway()
    server.call(work.done, b"done")
    assert peer.answer(stream)[1] == grpc_message(b"done")
    assert peer.ended()


def test_an_old_connection_has_a_grace(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    options = GrpcOptions(max_connection_age=50, max_connection_age_grace=50)
    server = serve(options=options, loop=clock)
    peer = connect(server)
    stream = peer.call("Hold", b"old")
    server.service.held.get(timeout=DEADLINE)
    clock.advance_from_thread(0.06)
    assert peer.goaway().additional_data == b"max_age"
    assert server.service.cancelled.empty()
    clock.advance_from_thread(0.06)
    assert peer.status(stream) == 14
    assert server.service.cancelled.get(timeout=DEADLINE) == b"old"
    assert peer.ended()


def test_a_silent_client_gets_a_keepalive_ping_and_is_disconnected(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    server = serve(options=GrpcOptions(keepalive_time=50, keepalive_timeout=50), loop=clock)
    peer = connect(server)
    peer.call("Hold", b"1")
    server.service.held.get(timeout=DEADLINE)
    clock.advance_from_thread(0.06)
    server_ping(peer)
    assert server.service.cancelled.empty()
    clock.advance_from_thread(0.06)
    assert server.service.cancelled.get(timeout=DEADLINE) == b"1"
    assert peer.ended()


def test_a_client_that_acknowledges_pings_stays_connected(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    options = GrpcOptions(
        keepalive_time=50,
        keepalive_timeout=50,
        http2_max_pings_without_data=0,
        http2_max_ping_strikes=0,
    )
    server = serve(options=options, loop=clock)
    peer = connect(server)
    peer.call("Hold", b"1")
    server.service.held.get(timeout=DEADLINE)
    for _ in range(5):
        clock.advance_from_thread(0.06)
        answer_ping(peer, server_ping(peer))
        peer.settle()
    assert server.service.cancelled.empty()


def test_the_number_of_pings_without_data_is_limited(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    options = GrpcOptions(
        keepalive_time=20, http2_max_pings_without_data=2, http2_max_ping_strikes=0
    )
    server = serve(options=options, loop=clock)
    peer = connect(server)
    held = peer.call("Hold", b"1")
    work = server.service.held.get(timeout=DEADLINE)
    for _ in range(2):
        clock.advance_from_thread(0.03)
        answer_ping(peer, server_ping(peer))
        peer.settle()
    for _ in range(10):
        clock.advance_from_thread(0.03)
    peer.call("Hold", b"2")
    server.service.held.get(timeout=DEADLINE)
    server.call(work.done, b"")
    peer.answer(held)
    assert sum(isinstance(f, PingFrame) and not f.flags for f in peer.frames) == 2
    clock.advance_from_thread(0.03)
    server_ping(peer)  # data was sent


@pytest.mark.parametrize("permitted", [False, True])
def test_pings_without_calls(
    serve: Serve, connect: Connect, clock: FakeClockLoop, permitted: bool
) -> None:
    options = GrpcOptions(
        keepalive_time=20,
        keepalive_timeout=50,
        keepalive_permit_without_calls=permitted,
        http2_max_ping_strikes=0,
    )
    peer = connect(serve(options=options, loop=clock))
    peer.settle()
    for _ in range(10):
        clock.advance_from_thread(0.03)
    if permitted:
        server_ping(peer)
        assert peer.ended()
    else:
        peer.settle()
        assert all("ACK" in f.flags for f in peer.frames if isinstance(f, PingFrame))


def test_a_client_that_sends_no_settings_is_disconnected(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(ConnectionLimits(handshake_timeout=0.05)), greet=False)
    assert peer.ended()


def test_an_idle_connection_is_drained(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    server = serve(ConnectionLimits(idle_timeout=0.05), loop=clock)
    peer = connect(server)
    stream = peer.call("Hold", b"1")
    work = server.service.held.get(timeout=DEADLINE)
    wait = connect(server)
    wait.settle()
    clock.advance_from_thread(0.06)
    assert wait.goaway().additional_data == b"idle"
    server.call(work.done, b"done")  # this one was not idle
    assert peer.answer(stream)[1] == grpc_message(b"done")
    peer.settle()
    assert not any(isinstance(f, GoAwayFrame) for f in peer.frames)
    clock.advance_from_thread(0.06)
    assert peer.goaway().additional_data == b"idle"


def test_pings_that_come_too_often_end_the_connection(serve: Serve, connect: Connect) -> None:
    peer = connect(serve(options=GrpcOptions(http2_max_ping_strikes=2)))
    for number in range(10):
        peer.send(PingFrame(0, b"ping%04d" % number))
    frame = peer.goaway()
    assert (frame.error_code, frame.additional_data) == (
        H2ErrorCode.ENHANCE_YOUR_CALM,
        b"too_many_pings",
    )
    answers = [f for f in peer.frames if isinstance(f, PingFrame)]
    assert len(answers) == 3  # the first is free, two strikes are allowed


@pytest.mark.parametrize(
    "options, times, sent, idle, too_many",
    [
        (GrpcOptions(), [0, 1, 2], [0, 0, 0], False, False),
        (GrpcOptions(), [0, 1, 2, 3], [0, 0, 0, 0], False, True),
        (GrpcOptions(), [0, 1, 2, 3], [0, 1, 2, 3], False, False),
        (GrpcOptions(), [0, 300, 600, 900, 1200], [0] * 5, False, False),
        (GrpcOptions(), [0, 300, 600, 900, 1200], [0] * 5, True, True),
        (
            GrpcOptions(keepalive_permit_without_calls=True),
            [0, 300, 600, 900, 1200],
            [0] * 5,
            True,
            False,
        ),
        (GrpcOptions(), [0, 7200, 14400, 21600, 28800], [0] * 5, True, False),
        (GrpcOptions(http2_max_ping_strikes=0), list(range(99)), [0] * 99, False, False),
        (
            GrpcOptions(http2_min_recv_ping_interval_without_data=1000),
            [0, 1, 2, 3, 4],
            [0] * 5,
            False,
            False,
        ),
    ],
)
def test_which_pings_are_too_many(
    options: GrpcOptions, times: list[float], sent: list[int], idle: bool, too_many: bool
) -> None:
    policy = PingPolicy(options)
    results = [
        policy.received_ping(time, data, idle) for time, data in zip(times, sent, strict=True)
    ]
    assert any(results) is too_many


def test_calls_finish_after_a_goaway_of_the_client(server: Server, peer: Peer) -> None:
    stream = peer.call("Hold", b"1")
    peer.send(GoAwayFrame(0))
    work = server.service.held.get(timeout=DEADLINE)
    server.call(work.done, b"done")
    assert peer.answer(stream)[1] == grpc_message(b"done")


def test_closed_connections_leave_no_memory(server: Server, connect: Connect) -> None:
    for _ in range(20):
        peer = connect(server)
        peer.call("Hold", b"x")
        server.service.held.get(timeout=DEADLINE)
        peer.send(HeadersFrame(3, b"", flags=["END_HEADERS"]), RstStreamFrame(5, 0))
        peer.close()
    server.wait_until_alone()
    for _ in range(20):
        assert server.service.cancelled.get(timeout=DEADLINE) == b"x"


def let_time_pass(peer: Peer, clock: FakeClockLoop, seconds: float) -> None:
    """Until there is something for the client to read."""

    def passed() -> bool:
        clock.advance_from_thread(seconds)
        return bool(select.select([peer.socket], [], [], 0)[0])

    wait_until(passed, "the server to say something")


BEGUN = grpc_message(bytes(1000))[:10]


@pytest.mark.parametrize("method", ["Echo", "EchoStream"])
def test_an_incomplete_message_ends_its_call_after_a_timeout(
    serve: Serve, connect: Connect, clock: FakeClockLoop, method: str
) -> None:
    server = serve(ConnectionLimits(data_rate_interval=5), loop=clock)
    peer = connect(server)
    peer.settle()
    slow = peer.open(method)
    peer.data(slow, BEGUN)
    beside = peer.call("Echo", b"beside")
    assert peer.answer(beside)[1] == grpc_message(b"beside")
    let_time_pass(peer, clock, 5)
    trailers = peer.answer(slow)[2]
    assert trailers["grpc-status"] == "4"
    assert trailers["grpc-message"] == "The request did not arrive in time"
    assert peer.reset_code(slow) == H2ErrorCode.NO_ERROR
    after = peer.call("Echo", b"after")
    assert peer.answer(after)[1] == grpc_message(b"after")


def test_a_unary_call_without_a_message_is_given_up(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    peer = connect(serve(ConnectionLimits(data_rate_interval=5), loop=clock))
    peer.settle()
    stream = peer.open("Echo")
    let_time_pass(peer, clock, 5)
    assert peer.status(stream) == 4


def test_only_bytes_at_the_minimum_data_rate_extend_the_timeout(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    peer = connect(
        serve(ConnectionLimits(data_rate_interval=5, min_interval_bytes=100), loop=clock)
    )
    slow, fast = peer.open("EchoStream"), peer.open("EchoStream")
    message = grpc_message(bytes(1000))
    sent = 0
    while sent + 100 < len(message):
        peer.data(slow, message[sent // 100 : sent // 100 + 1])
        peer.data(fast, message[sent : sent + 100])
        sent += 100
        peer.settle()
        clock.advance_from_thread(5)
    assert [f.stream_id for f in peer.frames if isinstance(f, RstStreamFrame)] == [slow]
    peer.data(fast, message[sent:], end=True)
    assert peer.answer(fast)[1] == message


def test_a_stream_may_be_silent_between_its_messages(
    serve: Serve, connect: Connect, clock: FakeClockLoop
) -> None:
    peer = connect(serve(ConnectionLimits(data_rate_interval=5), loop=clock))
    stream = peer.open("EchoStream")
    for _ in range(5):
        peer.settle()
        clock.advance_from_thread(5)
    peer.data(stream, grpc_message(b"at last"), end=True)
    assert peer.answer(stream)[1] == grpc_message(b"at last")


@pytest.mark.parametrize(
    "begun",
    [HeadersFrame(1, b"\x83", flags=[]).serialize(), PingFrame(0, b"12345678").serialize()[:12]],
    ids=["header block", "ping"],
)
def test_an_incomplete_frame_ends_the_connection_after_a_timeout(
    serve: Serve, connect: Connect, clock: FakeClockLoop, begun: bytes
) -> None:
    server = serve(ConnectionLimits(data_rate_interval=5, linger_timeout=1), loop=clock)
    peer = connect(server)
    peer.settle()
    peer.write(begun)
    let_time_pass(peer, clock, 5)
    frame = peer.goaway()
    assert (frame.error_code, frame.additional_data) == (H2ErrorCode.ENHANCE_YOUR_CALM, b"too slow")
    assert peer.ended()
    peer.close()
    server.wait_until_alone()

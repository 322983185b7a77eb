"""A whole HTTP/2 connection with a gRPC service on it, fed with any bytes in any pieces.

The first byte of an input says how the rest is meant, the second how it is cut. Half of the inputs
are bytes as they arrive; in the others each frame is told by four bytes and its payload, so that
changed inputs are still frames, and kinds from 16 on are requests that can be served.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from typing import Any

import hpack

from host.errors import not_found
from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import Router
from host.frontends.grpc.h2.h2_connection import H2Connection
from host.frontends.grpc.methods import (
    GrpcOptions,
    ResponseCallback,
    RpcContext,
    Services,
    StreamMethod,
    StreamWriter,
    UnaryMethod,
)
from host.frontends.receive_memory import ReceiveBudget, ReservedBytes
from host.instances.busy_polling import no_connection_hook
from tests.memory_transport import MemoryTransport

LIMITS = ConnectionLimits(
    max_message_size=4096,
    max_streams=8,
    stream_window=8192,
    connection_window=65536,
    max_frame=16384,
    max_send_queue=4096,
    max_header_block=4096,
    header_list_hard_limit=8192,
    reset_rate=(50, 1),
    no_op_frame_rate=(50, 1),
)
_MOST_KEPT = 2 * 16384  # bytes: one frame, and the bytes that arrived with its end
_PATHS = ["Echo", "Hold", "Fail", "EchoStream", "Flood", "Nothing"]


class _Held:
    def cancel(self) -> None:
        """Does nothing: no task waits for the call."""


async def _echo(data: bytes, context: RpcContext) -> bytes:
    return data


def _hold(
    data: bytes, done: ResponseCallback, context: RpcContext, reserved: ReservedBytes | None
) -> _Held:
    return _Held()


async def _fail(data: bytes, context: RpcContext) -> bytes:
    raise not_found(data.decode("latin-1"))


class _Stream:
    """Echoes, after `flood` messages of its own."""

    def __init__(self, client: StreamWriter, flood: int) -> None:
        self._client = client
        self._left = flood
        self._waits = self._refuses = self._half_closed = False
        self.resume_writing()

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        assert not self._half_closed, "a message after the end"
        self._refuses = not self._write(message)
        return not self._refuses

    def resume_writing(self) -> None:
        self._waits = False
        while self._left:
            self._left -= 1
            if not self._write(bytes(1000)):
                return
        if self._refuses:
            self._refuses = False
            self._client.resume_reading()
        self._end()

    def half_closed(self) -> None:
        assert not self._half_closed, "the end comes twice"
        self._half_closed = True
        self._end()

    def cancel(self) -> None:
        """Does nothing: no task waits for the call."""

    def _write(self, message: bytes) -> bool:
        self._waits = not self._client.write_message(message, False)
        return not self._waits

    def _end(self) -> None:
        if self._half_closed and not self._waits:
            self._client.finish_stream()


_SERVICES: Services = {
    "t.T": [
        UnaryMethod("Echo", _echo, ""),
        UnaryMethod("Hold", _echo, "", _hold),
        UnaryMethod("Fail", _fail, ""),
        StreamMethod("EchoStream", lambda client, _: _Stream(client, 0), ""),
        StreamMethod("Flood", lambda client, _: _Stream(client, 50), ""),
    ]
}


def _request(path: str, *extra: tuple[str, str]) -> bytes:
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/t.T/{path}"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *extra,
    ]
    return hpack.Encoder().encode(fields)


_BLOCKS = [_request(path) for path in _PATHS] + [
    _request("EchoStream", ("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip")),
    _request("Echo", ("content-length", "7"), ("grpc-timeout", "1S"), ("x-bin", "AAE")),
]


def _frames(program: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(program):
        kind, flags, stream, length = program[at : at + 4]
        at += 4
        payload = program[at : at + length]
        at += length
        if kind >= 128:
            payload, kind, flags = _BLOCKS[kind % len(_BLOCKS)], frames.HEADERS, 4 | flags & 1
        elif kind >= 64:
            message = struct.pack(">BI", flags >> 7, len(payload)) + payload
            payload, kind = message, frames.DATA
            flags &= 1
        yield frames.frame_header(len(payload), kind, flags, stream) + payload


def _pieces(data: bytes) -> Iterator[bytes]:
    how, cut, rest = data[0], data[1], data[2:]
    if how & 1:
        rest = b"".join(_frames(rest))
    if how & 2:
        rest = frames.PREFACE + frames.settings({}) + rest
    size = cut or len(rest) or 1
    return (rest[at : at + size] for at in range(0, len(rest), size))


def _sent(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Kind and stream of each frame that was sent. They are whole."""
    kinds, at = [], 0
    while at < len(data):
        high, low, kind, _, stream = frames.FRAME_HEADER.unpack_from(data, at)
        at += frames.FRAME_HEADER_SIZE + (high << 8 | low)
        kinds.append((kind, stream))
    assert at == len(data), "the last frame is not whole"
    return kinds


async def _converse(data: bytes) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
    gone: list[H2Connection] = []
    router = Router(_SERVICES, GrpcOptions(), LIMITS)
    budget = ReceiveBudget()
    made = H2Connection(
        router.route,
        GrpcOptions(),
        LIMITS,
        lambda _: None,
        gone.append,
        no_connection_hook(),
        budget,
    )
    sink = MemoryTransport()
    made.connection_made(sink)
    for number, piece in enumerate(_pieces(data)):
        made.data_received(piece)
        assert len(made.streams) <= LIMITS.max_streams
        assert len(made._buffer) <= _MOST_KEPT, "more is kept than one frame"
        held = sum(stream.unacknowledged_bytes for stream in made.streams.values())
        assert held <= LIMITS.connection_window, "more is held than was granted"
        if sink.closed:
            break
        if data[0] & 4 and number < 64:
            await asyncio.sleep(0)
        if data[0] & 8:
            made.pause_writing() if number & 1 else made.resume_writing()
    for _ in range(3):
        await asyncio.sleep(0)
    kinds = _sent(sink.data)
    assert b"unexpected failure" not in sink.data
    assert kinds[0] == (frames.SETTINGS, 0)
    assert all(kind != frames.PUSH_PROMISE for kind, _ in kinds)
    if sink.closed:
        assert kinds[-1] == (frames.GOAWAY, 0), "ended without a reason"
        assert not made.streams
    made.close()
    made.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not problems, problems
    assert not made.streams and not made.send_buffer.waiting_streams
    assert gone == [made]
    assert not budget.reserved_bytes, "memory of a closed connection is still counted"


SEEDS = [
    b"\x02\0",
    b"\0\3" + frames.PREFACE + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 10}),
    b"\x07\0" + bytes([128, 0, 1, 0, 64, 1, 1, 5]) + b"hello",
    b"\x07\x05" + bytes([131, 0, 1, 0, 64, 0, 1, 2]) + b"ab" + bytes([64, 1, 1, 2]) + b"cd",
    b"\x07\0" + bytes([132, 1, 1, 0, 8, 0, 0, 4, 0, 0, 1, 0, 3, 0, 1, 4]) + bytes(4),
    b"\x0f\0" + bytes([1, 0, 1, 1, 0x82, 9, 4, 1, 1, 0x84]) + bytes([6, 0, 0, 8]) + bytes(8),
    b"\x07\0" + bytes([4, 0, 0, 6, 0, 4, 0, 0, 0, 5]) + bytes([132, 1, 3, 0, 129, 0, 5, 0]),
    b"\x07\0" + bytes([135, 0, 1, 0, 64, 1, 1, 2]) + b"ab" + bytes([133, 1, 3, 0]),
]


def check(data: bytes, run: Callable[..., None] = asyncio.run) -> None:
    """The connection raises nothing, keeps little, and ends with a reason or can continue."""
    if len(data) >= 2:
        run(_converse(data))

"""A client that can break every rule, and a service for it to break them on."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import hpack
import uvloop
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from host.errors import not_found
from host.frontends.grpc.h2.frames import ConnectionLimits
from host.frontends.grpc.h2.frontend import H2Frontend
from host.frontends.grpc.methods import (
    GrpcOptions,
    ResponseCallback,
    RpcContext,
    Services,
    StreamMethod,
    StreamWriter,
    UnaryMethod,
)
from host.frontends.receive_memory import ReservedBytes
from tests.conftest import DEADLINE, wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

T = TypeVar("T")


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame that a library would not write."""
    length = len(payload)
    return struct.pack(">HBBBI", length >> 8, length & 255, kind, flags, stream) + payload


def grpc_message(data: bytes, flag: int = 0) -> bytes:
    """A message as it is inside of DATA."""
    return struct.pack(">BI", flag, len(data)) + data


class _Work:
    """A call that the test ends."""

    def __init__(self, data: bytes, done: ResponseCallback, cancelled: queue.Queue[bytes]) -> None:
        self.data, self.done, self._cancelled = data, done, cancelled

    def cancel(self) -> None:
        self._cancelled.put(self.data)


class Echo:
    """Serves a stream: sends what it gets, and takes no more while that waits."""

    def __init__(self, client: StreamWriter) -> None:
        self._client = client

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        return self._client.write_message(message, False)

    def resume_writing(self) -> None:
        self._client.resume_reading()

    def half_closed(self) -> None:
        self._client.finish_stream()

    def cancel(self) -> None:
        pass


class _Flood:
    """Sends as many messages of as many bytes as its one request says: `count size`."""

    def __init__(self, client: StreamWriter, service: TestService) -> None:
        self._client, self._service = client, service
        self._count = self._size = 0
        self._half_closed = self._waits = False

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        self._count, self._size = map(int, message.split())
        self.resume_writing()
        return True

    def resume_writing(self) -> None:
        self._service.sent += self._waits
        self._waits = False
        while self._count:
            self._count -= 1
            if not self._client.write_message(bytes(self._size), True):
                self._waits = True
                return
            self._service.sent += 1
        if self._half_closed:
            self._client.finish_stream()

    def half_closed(self) -> None:
        self._half_closed = True
        if not self._count and not self._waits:
            self._client.finish_stream()

    def cancel(self) -> None:
        self._service.cancelled.put(b"flood")


class _Sink:
    """Takes one message, and the others when it may; says at the end how many there were."""

    def __init__(self, client: StreamWriter, service: TestService) -> None:
        self._client = client
        self._taken = 0
        self._may_take = False
        service.may_take.append(self._take)

    def _take(self) -> None:
        self._may_take = True
        self._client.resume_reading()

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        self._taken += 1
        return self._may_take

    def resume_writing(self) -> None:
        self._client.finish_stream()

    def half_closed(self) -> None:
        self._client.write_message(b"%d" % self._taken, False)
        self._client.finish_stream()

    def cancel(self) -> None:
        pass


class TestService:
    """Echoes. `held` and `cancelled` report to the thread of the test."""

    __test__ = False

    def __init__(self) -> None:
        self.held: queue.Queue[_Work] = queue.Queue()
        self.waiting: queue.Queue[bytes] = queue.Queue()
        self.cancelled: queue.Queue[bytes] = queue.Queue()
        self.sent = 0  # messages that Flood could send
        self.may_take: list[Callable[[], None]] = []  # lets each Sink read on
        self.metadata: queue.Queue[Any] = queue.Queue()

    def services(self) -> Services:
        return {
            "test.Test": [
                UnaryMethod("Echo", self._echo, ""),
                UnaryMethod("Quick", self._echo, "", self._quick),
                UnaryMethod("Hold", self._echo, "", self._hold),
                UnaryMethod("Fail", self._fail, ""),
                UnaryMethod("Wait", self._wait, ""),
                StreamMethod("EchoStream", lambda client, _: Echo(client), ""),
                StreamMethod("Flood", lambda client, _: _Flood(client, self), ""),
                StreamMethod("Sink", lambda client, _: _Sink(client, self), ""),
            ]
        }

    async def drain(self, timeout: float) -> bool:
        return True

    async def _echo(self, data: bytes, context: RpcContext) -> bytes:
        self.metadata.put(list(context.invocation_metadata()))
        return data

    def _quick(
        self,
        data: bytes,
        done: ResponseCallback,
        context: RpcContext,
        reserved: ReservedBytes | None,
    ) -> _Work:
        done(data)
        return _Work(data, done, self.cancelled)

    def _hold(
        self,
        data: bytes,
        done: ResponseCallback,
        context: RpcContext,
        reserved: ReservedBytes | None,
    ) -> _Work:
        work = _Work(data, done, self.cancelled)
        self.held.put(work)
        return work

    async def _fail(self, data: bytes, context: RpcContext) -> bytes:
        raise not_found(data.decode())

    async def _wait(self, data: bytes, context: RpcContext) -> bytes:
        self.waiting.put(data)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.put(data)
        return data


class Server:
    """The engine with the service, in a loop of its own thread."""

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        options: GrpcOptions | None = None,
        loop: Any = None,
    ) -> None:
        self.loop = loop or uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.service: TestService = self.run(self._make())
        # `Peer.settle` pings as often as it likes.
        options = options or GrpcOptions(http2_max_ping_strikes=0)
        self.frontend = H2Frontend(self.service, "127.0.0.1", 0, options, limits)
        self.port = self.run(self.frontend.start())

    async def _make(self) -> TestService:
        return TestService()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE)

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stalled(self) -> int:
        """How many streams have more to send than they may leave; their handlers wait."""

        async def count() -> int:
            return sum(
                stream.pending_bytes > connection.limits.max_send_queue
                for connection in self.frontend._connections
                for stream in connection.streams.values()
            )

        return self.run(count())

    def wait_until_alone(self) -> None:
        """Waits until the engine has forgotten every connection."""
        wait_until(lambda: not self.frontend._connections, "no connections")

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Runs a function in the loop, and returns when it has run."""

        async def run() -> None:
            function(*arguments)

        self.run(run())

    def close(self) -> None:
        self.run(self.frontend.stop(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE)
        self.loop.close()
        assert not self.errors, self.errors


class Peer:
    """A connection that is told every byte it sends."""

    def __init__(self, port: int, settings: dict[int, int] | None = None, greet: bool = True):
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.buffer = b""
        self.frames: list[Frame] = []
        self.next_stream = 1
        self.auto_window = True  # grant the received bytes
        if greet:
            self.write(PREFACE)
            self.send(SettingsFrame(0, settings=settings or {}))

    def write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the server may be done with us
            self.socket.sendall(data)

    def send(self, *frames: Frame) -> None:
        self.write(b"".join(frame.serialize() for frame in frames))

    def block(self, path: str, *extra: tuple[str, str]) -> bytes:
        return self.encoder.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path if path.startswith("/") else f"/test.Test/{path}"),
                (":authority", "test"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                *extra,
            ]
        )

    def open(self, path: str, *extra: tuple[str, str], end: bool = False) -> int:
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
        self.send(HeadersFrame(stream, self.block(path, *extra), flags=flags))
        return stream

    def data(self, stream: int, data: bytes, end: bool = False) -> None:
        for start in range(0, max(len(data), 1), 16384):
            last = start + 16384 >= len(data)
            flags = ["END_STREAM"] if end and last else []
            self.send(DataFrame(stream, data[start : start + 16384], flags=flags))

    def call(self, path: str, data: bytes, *extra: tuple[str, str]) -> int:
        """A unary call; its stream."""
        stream = self.open(path, *extra)
        self.data(stream, grpc_message(data), end=True)
        return stream

    def read(self) -> Frame | None:
        """The next frame; None at the end of the connection."""
        while True:
            if len(self.buffer) >= 9:
                frame, length = Frame.parse_frame_header(memoryview(self.buffer[:9]))
                if len(self.buffer) >= 9 + length:
                    frame.parse_body(memoryview(self.buffer[9 : 9 + length]))
                    self.buffer = self.buffer[9 + length :]
                    self._note(frame)
                    return frame
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.buffer += data

    def _note(self, frame: Frame) -> None:
        self.frames.append(frame)
        if isinstance(frame, DataFrame) and frame.flow_controlled_length and self.auto_window:
            size = frame.flow_controlled_length
            self.send(WindowUpdateFrame(0, size), WindowUpdateFrame(frame.stream_id, size))

    def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        """Reads to the first frame that is wanted."""
        while True:
            frame = self.read()
            assert frame is not None, f"the connection ended after {self.frames[-5:]}"
            if wanted(frame):
                return frame

    def answer(self, stream: int) -> tuple[dict[str, str], bytes, dict[str, str]]:
        """Head, data and trailers of a response; a head that is the end is both."""
        heads: list[dict[str, str]] = []
        body = b""
        while True:
            frame = self.until(lambda frame: frame.stream_id == stream)
            if isinstance(frame, HeadersFrame):
                data = frame.data
                while "END_HEADERS" not in frame.flags:
                    more = self.read()
                    assert isinstance(more, ContinuationFrame)
                    data += more.data
                    frame.flags |= more.flags
                fields = self.decoder.decode(data)
                heads.append({str(name): str(value) for name, value in fields})
                if "END_STREAM" in frame.flags:
                    return heads[0], body, heads[-1]
            elif isinstance(frame, DataFrame):
                body += frame.data
            elif isinstance(frame, RstStreamFrame):
                raise AssertionError(f"reset with {frame.error_code}")

    def status(self, stream: int) -> int:
        """The gRPC status of a response."""
        return int(self.answer(stream)[2]["grpc-status"])

    def reset_code(self, stream: int) -> int:
        frame = self.until(lambda f: f.stream_id == stream and isinstance(f, RstStreamFrame))
        assert isinstance(frame, RstStreamFrame)
        return frame.error_code

    def goaway(self) -> GoAwayFrame:
        frame = self.until(lambda frame: isinstance(frame, GoAwayFrame))
        assert isinstance(frame, GoAwayFrame)
        return frame

    def ended(self) -> bool:
        """Reads to the end of the connection."""
        while self.read() is not None:
            pass
        return True

    def settle(self, data: bytes = b"settled!") -> None:
        """Returns when the server has handled everything sent before."""
        self.send(PingFrame(0, data))
        self.until(lambda frame: isinstance(frame, PingFrame) and frame.opaque_data == data)

    def close(self) -> None:
        self.socket.close()


Serve = Callable[..., Server]
"""The fixture `serve`: a server with these limits."""

Connect = Callable[..., Peer]
"""The fixture `connect`: a client of a server."""

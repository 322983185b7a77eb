"""A client's HTTP/2 connection for gRPC: sends prepared messages at little cost for each."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast
from urllib.parse import unquote

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import FRAME_HEADER, FRAME_HEADER_SIZE, H2ErrorCode, Setting
from host.frontends.grpc.h2.grpc_messages import hpack_field
from host.frontends.grpc.h2.hpack import HpackDecoder

_STATUS_NAMES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS"
    " PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED"
    " INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
).split()
CONNECTION_LOST = "connection lost"

_NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_ACKNOWLEDGED_BYTES = 1 << 30  # of the window of 2 GiB, before it is enlarged again
_MAX_HEADER_LIST = 1 << 20
_MAX_FRAME = 1 << 18
_CACHED_BLOCKS = 256
_GREETING = (
    frames.PREFACE
    # No dynamic table: equal header blocks then mean the same, and each is decoded once.
    + frames.settings(
        {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
            Setting.MAX_FRAME_SIZE: _MAX_FRAME,
        }
    )
    + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
)


class Receiver(Protocol):
    """Receives the responses to a request."""

    def on_message(self, message: bytes) -> None:
        """Called for each of several messages or events; not for the message of a unary call."""

    def on_end(self, status: str, message: str) -> None:
        """The response is complete; `status` is "" for success."""


class Stream:
    """A stream of a connection: one call."""

    __slots__ = ("fields", "number", "pending", "reads_messages", "received", "receiver", "rest",
                 "window")  # fmt: skip

    def __init__(self, number: int, receiver: Receiver, reads_messages: bool, window: int) -> None:
        self.number = number
        self.receiver = receiver
        self.reads_messages = reads_messages
        self.window = window
        self.pending: deque[tuple[memoryview, int]] | None = None  # DATA and flags
        self.fields: dict[bytes, bytes] = {}
        self.rest = bytearray()  # an incomplete message
        self.received = 0


def encode_headers(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encodes a header block of literal fields, which neither end has to remember."""
    return b"".join(hpack_field(name.decode(), value) for name, value in fields)


def frame_message(message: bytes) -> bytes:
    """Frames a message for gRPC, without compression."""
    return b"\0" + _NUMBER.pack(len(message)) + message


class Http2Connection(asyncio.Protocol):
    """Carries calls of one method; `block` is the header block of each request."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._transport: asyncio.Transport | None = None
        self._decoder = HpackDecoder(_MAX_HEADER_LIST)
        self._known: dict[bytes, dict[bytes, bytes]] = {}
        self._streams: dict[int, Stream] = {}
        self._next_number = 1
        self._rest = b""
        self._header_block = b""  # of a HEADERS frame whose CONTINUATION frames are to come
        self._window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW
        self._max_frame = frames.DEFAULT_MAX_FRAME
        self._max_streams = frames.MAX_STREAM
        self._received = 0
        self._blocked: deque[Stream] = deque()  # streams that wait for room in a window
        self._leaving = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server has sent its settings; it fails if it does not."""
        self.successor: asyncio.Future[Any] | None = None
        """The connection that takes the place of this one, when it is lost."""

    @property
    def has_room(self) -> bool:
        """Whether the server takes another stream."""
        return not self._leaving and len(self._streams) < self._max_streams

    @property
    def is_open(self) -> bool:
        """Whether calls can be started, when there is room."""
        return not self._leaving and self._transport is not None

    def start_call(self, receiver: Receiver, reads_messages: bool = False) -> Stream:
        """Opens a stream for several messages."""
        stream = self._open_stream(receiver, reads_messages)
        self._write(frames.headers(stream.number, self._block, False, self._max_frame))
        return stream

    def send_request(self, message: bytes, receiver: Receiver) -> Stream:
        """Opens a stream for one message, which is framed already."""
        stream = self._open_stream(receiver, False)
        number, block, size = stream.number, self._block, len(message)
        if len(block) > self._max_frame:
            self._write(frames.headers(number, block, False, self._max_frame))
            self._send_data(stream, message, frames.END_STREAM)
        elif size <= self._max_frame and size <= stream.window and size <= self._window:
            stream.window -= size
            self._window -= size
            pack, length = FRAME_HEADER.pack, len(block)
            self._write(
                b"".join(
                    (
                        pack(length >> 8, length & 255, frames.HEADERS, frames.END_HEADERS, number),
                        block,
                        pack(size >> 8, size & 255, frames.DATA, frames.END_STREAM, number),
                        message,
                    )
                )
            )
        else:
            self._write(frames.headers(number, block, False, self._max_frame))
            self._send_data(stream, message, frames.END_STREAM)
        return stream

    def send_message(self, stream: Stream, message: bytes) -> None:
        """Sends one more message, which is framed already."""
        self._send_data(stream, message, 0)

    def cancel_call(self, stream: Stream) -> None:
        """Resets a stream; its receiver is not told."""
        if self._streams.pop(stream.number, None) is not None and self._transport is not None:
            self._write(frames.rst_stream(stream.number, H2ErrorCode.CANCEL))

    def close(self) -> None:
        """Closes the connection; receivers are not told."""
        self._streams.clear()
        self._leaving = True
        if self._transport is not None:
            self._transport.abort()

    def _open_stream(self, receiver: Receiver, reads_messages: bool) -> Stream:
        number = self._next_number
        self._next_number = number + 2
        if number > frames.MAX_STREAM - 4:
            self._leaving = True  # numbers have run out
        stream = Stream(number, receiver, reads_messages, self._stream_window)
        self._streams[number] = stream
        return stream

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _send_data(self, stream: Stream, message: bytes, flags: int) -> None:
        if stream.pending is None:
            stream.pending = deque()
        stream.pending.append((memoryview(message), flags))
        if len(stream.pending) == 1 and not self._flush(stream):
            self._blocked.append(stream)

    def _flush(self, stream: Stream) -> bool:
        """Sends what the windows have room for; returns whether that is everything."""
        pending = stream.pending
        while pending:
            data, flags = pending[0]
            room = min(self._window, stream.window, self._max_frame)
            if room <= 0:
                return False
            part = data[:room]
            size = len(part)
            stream.window -= size
            self._window -= size
            last = size == len(data)
            header = frames.frame_header(size, frames.DATA, flags if last else 0, stream.number)
            self._write(header + part)
            if last:
                pending.popleft()
            else:
                pending[0] = (data[size:], flags)
        return True

    def _flush_blocked(self) -> None:
        for _ in range(len(self._blocked)):
            stream = self._blocked.popleft()
            if stream.number in self._streams and not self._flush(stream):
                self._blocked.append(stream)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the preface and the settings."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such class
        self._transport.write(_GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all streams."""
        self._transport = None
        self._leave(str(exc or "closed by the server"), 0)

    def _leave(self, why: str, last: int) -> None:
        """Ends the streams after the last one that the server processes."""
        self._leaving = True
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(why))
        for number in [number for number in self._streams if number > last]:
            self._streams.pop(number).receiver.on_end(CONNECTION_LOST, why)

    def data_received(self, data: bytes) -> None:
        """Reads frames."""
        if self._rest:
            data = self._rest + data
        position, end = 0, len(data)
        unpack = FRAME_HEADER.unpack_from
        while end - position >= FRAME_HEADER_SIZE:
            high, low, kind, flags, number = unpack(data, position)
            start = position + FRAME_HEADER_SIZE
            stop = start + (high << 8 | low)
            if stop > end:
                break
            position = stop
            if kind == frames.DATA:
                self._on_data(number, flags, data[start:stop])
            elif kind == frames.HEADERS and flags & frames.END_HEADERS:
                self._on_headers(number, flags, data[start:stop])
            else:
                self._on_other(kind, flags, number, data[start:stop])
            if self._transport is None:
                return
        self._rest = data[position:]

    def _on_data(self, number: int, flags: int, data: bytes) -> None:
        size = len(data)
        self._received += size
        if self._received > _ACKNOWLEDGED_BYTES:
            self._write(frames.window_update(0, self._received))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.received += size
        if stream.received > _ACKNOWLEDGED_BYTES:
            self._write(frames.window_update(number, stream.received))
            stream.received = 0
        if stream.reads_messages:
            if flags & frames.PADDED:
                data = data[1 : size - data[0]]
            self._read_messages(stream, data)
        if flags & frames.END_STREAM:
            self._end_stream(stream)

    def _read_messages(self, stream: Stream, data: bytes) -> None:
        if stream.rest:
            stream.rest += data  # in place: a large message arrives in many frames
            if len(stream.rest) < 5:
                return
            if len(stream.rest) < 5 + _NUMBER.unpack_from(stream.rest, 1)[0]:
                return
            data = bytes(stream.rest)
        position, end = 0, len(data)
        while end - position >= 5:
            stop = position + 5 + _NUMBER.unpack_from(data, position + 1)[0]
            if stop > end:
                break
            message = data[position + 5 : stop]
            position = stop
            stream.receiver.on_message(message)
            if stream.number not in self._streams:
                return  # it was cancelled: what follows would be taken for the next response
        if position < end or stream.rest:
            stream.rest = bytearray(data[position:])

    def _on_headers(self, number: int, flags: int, block: bytes) -> None:
        if flags & (frames.PADDED | frames.WITH_PRIORITY):
            padding, start = (block[0], 1) if flags & frames.PADDED else (0, 0)
            start += 5 if flags & frames.WITH_PRIORITY else 0
            block = block[start : len(block) - padding]
        fields = self._known.get(block)
        if fields is None:
            fields = self._decode(block)
        stream = self._streams.get(number)
        if stream is None:
            return
        if flags & frames.END_STREAM:
            stream.fields = {**stream.fields, **fields} if stream.fields else fields
            self._end_stream(stream)
        elif b"grpc-status" in fields or fields.get(b":status") != b"200":
            stream.fields = fields

    def _decode(self, block: bytes) -> dict[bytes, bytes]:
        changes = self._decoder.table_changes
        try:
            fields = dict(self._decoder.decode(block)[0])
        except ValueError as error:
            self._break_off(f"header block: {error}")
            return {}
        if changes == self._decoder.table_changes and len(self._known) < _CACHED_BLOCKS:
            self._known[block] = fields
        return fields

    def _end_stream(self, stream: Stream) -> None:
        del self._streams[stream.number]
        fields = stream.fields
        code = fields.get(b"grpc-status")
        if code == b"0":
            stream.receiver.on_end("", "")
        elif code is None:
            status = fields.get(b":status", b"no status").decode("latin-1")
            stream.receiver.on_end(f"HTTP {status}", "the answer is not one of gRPC")
        else:
            text = unquote(fields.get(b"grpc-message", b"").decode("latin-1"))
            stream.receiver.on_end(_status_name(code), text)

    def _on_other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.SETTINGS:
            if not flags & frames.ACK:
                self._on_settings(payload)
        elif kind == frames.WINDOW_UPDATE:
            increment = _NUMBER.unpack(payload)[0]
            if number == 0:
                self._window += increment
            elif (stream := self._streams.get(number)) is not None:
                stream.window += increment
            if self._blocked:
                self._flush_blocked()
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self._write(frames.ping(payload, ack=True))
        elif kind == frames.RST_STREAM:
            if (stream := self._streams.pop(number, None)) is not None:
                code = _NUMBER.unpack(payload)[0]
                known = {int(one): one.name for one in H2ErrorCode}
                stream.receiver.on_end("RST_STREAM", f"the server has reset the stream with"
                                       f" {known.get(code, code)}")  # fmt: skip
        elif kind == frames.GOAWAY:
            last, code = struct.unpack_from(">II", payload)
            text = payload[8:].decode("utf-8", "replace") or f"GOAWAY with code {code}"
            self._leave(f"the server closes the connection: {text}", last)
        elif kind == frames.HEADERS:  # its block goes on
            self._header_block = payload
            self._header_flags = flags
        elif kind == frames.CONTINUATION:
            self._header_block += payload
            if flags & frames.END_HEADERS:
                self._on_headers(number, self._header_flags, self._header_block)

    def _on_settings(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                self._max_frame = value
            elif name == Setting.MAX_CONCURRENT_STREAMS:
                self._max_streams = value
        self._write(frames.SETTINGS_ACK)
        if not self.ready.done():
            self.ready.set_result(None)
        self._flush_blocked()

    def _break_off(self, why: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._leave(why, 0)


def _status_name(code: bytes) -> str:
    try:
        return _STATUS_NAMES[int(code)]
    except (ValueError, IndexError):
        return f"grpc-status {code.decode('latin-1')}"

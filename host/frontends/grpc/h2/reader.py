"""Bytes from a client into frames: layout, sizes, padding and header blocks (RFC 9113 4 and 6)."""

from __future__ import annotations

import struct
from typing import Protocol

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import (
    DATA,
    END_HEADERS,
    HEAD,
    HEAD_SIZE,
    HEADERS,
    PADDED,
    PREFACE,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
)
from host.frontends.grpc.h2.limits import Limits

Piece = bytes | memoryview

_VIEW_FROM = 16384  # bytes; a view of less would keep much more memory than it shows
_STREAM_BITS = 0x7FFFFFFF
_ODD_HEADERS = frames.END_HEADERS | frames.PADDED | frames.WITH_PRIORITY
_NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")


class FrameEvents(Protocol):
    """Who is told of frames. May raise ConnectionFault, which `feed` passes on."""

    def data(self, stream: int, piece: Piece, size: int, end: bool) -> None:
        """Bytes of a DATA frame, maybe not all; `size` is what they take of the window."""

    def headers(self, stream: int, block: bytes, end: bool) -> None:
        """A whole header block."""

    def settings(self, values: list[tuple[int, int]]) -> None:
        """The client's settings."""

    def settings_ack(self) -> None:
        """It has taken ours."""

    def ping(self, data: bytes, ack: bool) -> None:
        """Eight bytes, as a question or an answer."""

    def window_update(self, stream: int, increment: int) -> None:
        """Room for more data of a stream, or of the connection if it is 0."""

    def peer_reset(self, stream: int) -> None:
        """The client has given a stream up."""

    def goaway(self, code: int) -> None:
        """The client will open no more streams."""

    def idle(self) -> None:
        """A frame came that does nothing."""

    def refuse(self, stream: int, code: ErrorCode) -> None:
        """A frame broke a rule that ends its stream only."""


class FrameReader:
    """Cuts what arrives into frames, however it is split.

    Whole frames are buffered, except DATA, whose bytes are passed on as they come: so at most one
    frame of another kind and one header block are held.
    """

    def __init__(self, events: FrameEvents, limits: Limits) -> None:
        self._events = events
        self._limits = limits
        self._buffer = bytearray()  # the beginning of something
        self._need = len(PREFACE)  # bytes that the buffer must have before it is looked at
        self.taken = 0  # bytes so far
        self._begun = False  # the preface was there
        self._greeted = False  # so was the first SETTINGS
        self._data_stream = 0  # of the DATA frame that is coming in
        self._data_left = 0
        self._data_end = False
        self._block_stream = 0  # of the header block that is coming in; 0 for none
        self._block_end = False
        self._block: list[bytes] = []

    @property
    def inside(self) -> bool:
        """Whether a frame, or a header block, has come only in part; DATA does not count."""
        return bool(self._buffer or self._block_stream)

    def feed(self, data: bytes) -> None:
        """Take what has arrived. Raises ConnectionFault; nothing may be fed after that."""
        self.taken += len(data)
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._need and self._begun:
                return
            data = bytes(buffer)
            buffer.clear()
        position, end = 0, len(data)
        if self._data_left:
            position = self._more_data(data)
        elif not self._begun:
            if not self._preface(data):
                return
            position = self._need
            self._begun = True
        self._need = HEAD_SIZE
        events, most = self._events, self._limits.max_frame
        while end - position >= HEAD_SIZE:
            high, low, kind, flags, stream = HEAD.unpack_from(data, position)
            length = high << 8 | low
            if length > most:
                raise _fault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes, limit {most}")
            start = position + HEAD_SIZE
            stop = start + length
            stream &= _STREAM_BITS
            # The first branches are what nearly all frames are, at the least price.
            if self._block_stream or not self._greeted:
                self._check_order(kind, stream)
            elif kind == WINDOW_UPDATE:
                if length == 4 and stop <= end:
                    increment = _NUMBER.unpack_from(data, start)[0] & _STREAM_BITS
                    if increment:
                        events.window_update(stream, increment)
                        position = stop
                        continue
            elif kind > HEADERS or not stream:
                self._check_order(kind, stream)
            if kind == DATA and not flags & PADDED:
                if stop > end:
                    self._begin_data(stream, flags, _cut(data, start, end), length)
                    return
                piece = data[start:stop] if length < _VIEW_FROM else _cut(data, start, stop)
                events.data(stream, piece, length, bool(flags & 1))
            elif stop > end:
                self._need = HEAD_SIZE + length
                break
            elif kind == HEADERS and flags & _ODD_HEADERS == END_HEADERS:
                if length > self._limits.header_block:
                    self._check_block(length)
                events.headers(stream, data[start:stop], bool(flags & 1))
            else:
                self._frame(kind, flags, stream, data[start:stop])
            position = stop
        if position < end:
            buffer += data[position:] if position else data

    def _preface(self, data: bytes) -> bool:
        """Whether it is there. Raises for what cannot become it."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise _fault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if len(data) < len(PREFACE):
            self._buffer += data
            return False
        return True

    def _check_order(self, kind: int, stream: int) -> None:
        if self._block_stream:
            if kind != frames.CONTINUATION or stream != self._block_stream:
                raise _fault(ErrorCode.PROTOCOL_ERROR, "a header block was not continued")
        elif not self._greeted and kind != frames.SETTINGS:
            raise _fault(ErrorCode.PROTOCOL_ERROR, "the first frame was not SETTINGS")
        if not stream and kind in _NEED_A_STREAM:
            raise _fault(ErrorCode.PROTOCOL_ERROR, f"frame of kind {kind} without a stream")
        if stream and kind in _NEED_NO_STREAM:
            raise _fault(ErrorCode.PROTOCOL_ERROR, f"frame of kind {kind} on a stream")

    def _begin_data(self, stream: int, flags: int, piece: Piece, length: int) -> None:
        self._data_stream = stream
        self._data_end = bool(flags & frames.END_STREAM)
        self._data_left = length - len(piece)
        if piece:
            self._events.data(stream, piece, len(piece), False)

    def _more_data(self, data: bytes) -> int:
        """Bytes of the DATA frame that is coming in; how many there were."""
        size = min(self._data_left, len(data))
        self._data_left -= size
        end = self._data_end and not self._data_left
        self._events.data(self._data_stream, _cut(data, 0, size), size, end)
        return size

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._headers(flags, stream, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream, payload)
        elif kind == frames.DATA:
            bare = _unpadded(payload)
            self._events.data(stream, bare, len(payload), bool(flags & frames.END_STREAM))
        elif kind == frames.CONTINUATION:
            if not self._block_stream:
                raise _fault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self._continue(flags, payload)
        elif kind == frames.RST_STREAM:
            _exactly(4, "RST_STREAM", payload)
            self._events.peer_reset(stream)
        elif kind == frames.SETTINGS:
            self._settings(flags, payload)
        elif kind == frames.PING:
            self._events.ping(_exactly(8, "PING", payload), bool(flags & frames.ACK))
        elif kind == frames.GOAWAY:
            if len(payload) < 8:
                raise _fault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of less than 8 bytes")
            self._events.goaway(_NUMBER.unpack_from(payload, 4)[0])
        elif kind == frames.PUSH_PROMISE:
            raise _fault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:  # PRIORITY, which is deprecated, and kinds that we do not know
            self._events.idle()
            if kind == frames.PRIORITY and len(payload) != 5:
                self._events.refuse(stream, ErrorCode.FRAME_SIZE_ERROR)

    def _headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = _unpadded(payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise _fault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            payload = payload[5:]
        end = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._check_block(len(payload))
            self._events.headers(stream, payload, end)
            return
        self._block_stream, self._block_end, self._block = stream, end, []
        self._continue(flags, payload)

    def _continue(self, flags: int, payload: bytes) -> None:
        self._block.append(payload)
        self._check_block(sum(map(len, self._block)))
        if len(self._block) > self._limits.continuations + 1:
            raise _fault(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        if flags & frames.END_HEADERS:
            stream, self._block_stream = self._block_stream, 0
            block, self._block = b"".join(self._block), []
            self._events.headers(stream, block, self._block_end)

    def _check_block(self, size: int) -> None:
        if size > self._limits.header_block:
            raise _fault(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"header block of more than {self._limits.header_block} bytes",
            )

    def _window_update(self, stream: int, payload: bytes) -> None:
        (increment,) = _NUMBER.unpack(_exactly(4, "WINDOW_UPDATE", payload))
        increment &= _STREAM_BITS
        if increment:
            self._events.window_update(stream, increment)
        elif stream:
            self._events.refuse(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            raise _fault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")

    def _settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if not self._greeted:
                raise _fault(ErrorCode.PROTOCOL_ERROR, "the first SETTINGS was an answer")
            _exactly(0, "acknowledging SETTINGS", payload)
            self._events.settings_ack()
            return
        if len(payload) % _SETTING.size:
            raise _fault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._greeted = True
        self._events.settings(list(_SETTING.iter_unpack(payload)))


_NEED_A_STREAM = frozenset(
    (frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION)
)
_NEED_NO_STREAM = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))


def _fault(code: ErrorCode, text: str) -> ConnectionFault:
    return ConnectionFault(code, text)


def _cut(data: bytes, start: int, stop: int) -> Piece:
    return data[start:stop] if stop - start < _VIEW_FROM else memoryview(data)[start:stop]


def _exactly(size: int, name: str, payload: bytes) -> bytes:
    if len(payload) != size:
        raise _fault(ErrorCode.FRAME_SIZE_ERROR, f"{name} of {len(payload)} bytes, expected {size}")
    return payload


def _unpadded(payload: bytes) -> bytes:
    """What is left without padding."""
    if not payload:
        raise _fault(ErrorCode.FRAME_SIZE_ERROR, "padded frame without a padding length")
    stop = len(payload) - payload[0]
    if stop < 1:
        raise _fault(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1:stop]

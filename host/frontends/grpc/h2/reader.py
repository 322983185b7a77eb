"""Parses a client's bytes into HTTP/2 frames (RFC 9113 sections 4 and 6)."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from host.frontends.grpc.h2 import frames
from host.frontends.grpc.h2.frames import (
    DATA,
    END_HEADERS,
    FRAME_HEADER,
    FRAME_HEADER_SIZE,
    HEADERS,
    PADDED,
    PREFACE,
    WINDOW_UPDATE,
    ConnectionLimits,
    H2ConnectionError,
    H2ErrorCode,
)
from host.frontends.grpc.h2.grpc_messages import ReceivedMessage
from host.frontends.receive_memory import Piece
from host.lane import read_messages, read_request

if TYPE_CHECKING:
    from host.lane._lane import RequestFrames

_MIN_VIEW_BYTES = 16384  # bytes; a smaller view would keep much more memory alive
_KIND = 3  # its place in a frame
_STREAM_BITS = 0x7FFFFFFF
_HEADERS_FLAGS = frames.END_HEADERS | frames.PADDED | frames.WITH_PRIORITY
_NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_REQUEST_COST = 256  # of opening a stream, in bytes of header blocks that take as long to decode


class FrameReader(ABC):
    """Splits received bytes into frames, and calls an `on_` method for each.

    These methods may raise H2ConnectionError, which `feed` passes on.

    DATA is passed on as it arrives. Other frames are buffered until they are complete, so the
    reader holds at most one frame and one header block, and the rest of what it was fed when it
    pauses. It pauses after as many requests as one turn of the event loop may handle.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._buffer = bytearray()  # an incomplete frame, or the incomplete preface
        self._min_buffered = len(PREFACE)  # bytes needed before the buffer is parsed
        self.bytes_received = 0
        self._preface_received = False
        self._settings_received = False  # the first SETTINGS
        self._data_stream = 0  # of the incomplete DATA frame
        self._data_left = 0
        self._data_end = False
        self._block_stream = 0  # of the incomplete header block; 0 for none
        self._block_end = False
        self._block: list[bytes] = []
        self._turn_cost = 0
        self._max_usual_frame = min(
            limits.max_frame, limits.max_header_block, limits.max_message_size, _MIN_VIEW_BYTES - 1
        )
        self.paused = False  # the rest of the input waits for `feed(b"")`, in a later turn

    @property
    def in_frame(self) -> bool:
        """Whether a frame other than DATA, or a header block, is incomplete."""
        return bool(self._buffer or self._block_stream)

    def feed(self, data: bytes) -> None:
        """Parses received bytes. Raises H2ConnectionError; the reader is unusable after that."""
        self.bytes_received += len(data)
        self._turn_cost = 0
        self.paused = False
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._min_buffered and self._preface_received:
                return
            data = bytes(buffer)
            buffer.clear()
        position, end = 0, len(data)
        if self._data_left:
            position = self._continue_data_frame(data)
        elif not self._preface_received:
            if not self._check_preface(data):
                return
            position = self._min_buffered
            self._preface_received = True
        self._min_buffered = FRAME_HEADER_SIZE
        limits = self.limits
        max_frame, max_turn = limits.max_frame, limits.max_turn_cost
        while end - position >= FRAME_HEADER_SIZE:
            if read_request is None or not self._settings_received or self._block_stream:
                pass
            elif data[position + _KIND] == DATA:
                messages = read_messages and read_messages(data, position, self._max_usual_frame)
                if messages and self.on_messages(*messages):
                    position = messages[0]
                    continue
            else:
                request = read_request(data, position, self._max_usual_frame)
                if request is not None:
                    length = len(request[2])
                    cost = self._turn_cost + _REQUEST_COST + length
                    if cost <= max_turn:  # otherwise, the turn ends after the header block
                        self._turn_cost = cost
                        position = (
                            request[0]
                            if self.on_request(request)
                            else position + FRAME_HEADER_SIZE + length
                        )
                        continue
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(data, position)
            length = high << 8 | low
            if length > max_frame:
                raise _connection_error(
                    H2ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes, limit {max_frame}"
                )
            start = position + FRAME_HEADER_SIZE
            stop = start + length
            stream &= _STREAM_BITS
            # The common frames are handled first, and inline.
            if self._block_stream or not self._settings_received:
                self._check_frame_order(kind, stream)
            elif kind == WINDOW_UPDATE:
                if length == 4 and stop <= end:
                    increment = _NUMBER.unpack_from(data, start)[0] & _STREAM_BITS
                    if increment:
                        self.on_window_update(stream, increment)
                        position = stop
                        continue
            elif kind > HEADERS or not stream:
                self._check_frame_order(kind, stream)
            if kind == DATA and not flags & PADDED:
                if stop > end:
                    self._start_data_frame(stream, flags, _slice(data, start, end), length)
                    return
                piece = data[start:stop] if length < _MIN_VIEW_BYTES else _slice(data, start, stop)
                self.on_data(stream, piece, length, bool(flags & 1))
            elif stop > end:
                self._min_buffered = FRAME_HEADER_SIZE + length
                break
            elif kind == HEADERS and flags & _HEADERS_FLAGS == END_HEADERS:
                if length > limits.max_header_block:
                    self._check_header_block_size(length)
                self._turn_cost += _REQUEST_COST + length
                self.on_headers(stream, data[start:stop], bool(flags & 1))
            else:
                self._handle_frame(kind, flags, stream, data[start:stop])
            position = stop
            if self._turn_cost > max_turn:
                self.paused = position < end
                break
        if position < end:
            buffer += data[position:] if position else data

    def _check_preface(self, data: bytes) -> bool:
        """Returns whether the preface is complete. Raises H2ConnectionError if it is wrong."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if len(data) < len(PREFACE):
            self._buffer += data
            return False
        return True

    def _check_frame_order(self, kind: int, stream: int) -> None:
        if self._block_stream:
            if kind != frames.CONTINUATION or stream != self._block_stream:
                raise _connection_error(
                    H2ErrorCode.PROTOCOL_ERROR, "a header block was not continued"
                )
        elif not self._settings_received and kind != frames.SETTINGS:
            raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, "the first frame was not SETTINGS")
        if not stream and kind in _STREAM_FRAMES:
            raise _connection_error(
                H2ErrorCode.PROTOCOL_ERROR, f"frame of kind {kind} without a stream"
            )
        if stream and kind in _CONNECTION_FRAMES:
            raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, f"frame of kind {kind} on a stream")

    def _start_data_frame(self, stream: int, flags: int, piece: Piece, length: int) -> None:
        self._data_stream = stream
        self._data_end = bool(flags & frames.END_STREAM)
        self._data_left = length - len(piece)
        if piece:
            self.on_data(stream, piece, len(piece), False)

    def _continue_data_frame(self, data: bytes) -> int:
        """Passes on data of the incomplete DATA frame; returns how many bytes."""
        size = min(self._data_left, len(data))
        self._data_left -= size
        end = self._data_end and not self._data_left
        self.on_data(self._data_stream, _slice(data, 0, size), size, end)
        return size

    def _handle_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._headers(flags, stream, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream, payload)
        elif kind == frames.DATA:
            bare = _strip_padding(payload)
            self.on_data(stream, bare, len(payload), bool(flags & frames.END_STREAM))
        elif kind == frames.CONTINUATION:
            if not self._block_stream:
                raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self._continue_header_block(flags, payload)
        elif kind == frames.RST_STREAM:
            _check_length(4, "RST_STREAM", payload)
            self.on_rst_stream(stream)
        elif kind == frames.SETTINGS:
            self._settings(flags, payload)
        elif kind == frames.PING:
            self.on_ping(_check_length(8, "PING", payload), bool(flags & frames.ACK))
        elif kind == frames.GOAWAY:
            if len(payload) < 8:
                raise _connection_error(H2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of less than 8 bytes")
            self.on_goaway(_NUMBER.unpack_from(payload, 4)[0])
        elif kind == frames.PUSH_PROMISE:
            raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:  # PRIORITY, which is deprecated, and unknown kinds
            self.on_no_op_frame()
            if kind == frames.PRIORITY and len(payload) != 5:
                self.on_stream_error(stream, H2ErrorCode.FRAME_SIZE_ERROR)

    def _headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = _strip_padding(payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise _connection_error(
                    H2ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority"
                )
            payload = payload[5:]
        end = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._check_header_block_size(len(payload))
            self._turn_cost += _REQUEST_COST + len(payload)
            self.on_headers(stream, payload, end)
            return
        self._block_stream, self._block_end, self._block = stream, end, []
        self._continue_header_block(flags, payload)

    def _continue_header_block(self, flags: int, payload: bytes) -> None:
        self._block.append(payload)
        self._check_header_block_size(sum(map(len, self._block)))
        if len(self._block) > self.limits.max_continuations + 1:
            raise _connection_error(H2ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        if flags & frames.END_HEADERS:
            stream, self._block_stream = self._block_stream, 0
            block, self._block = b"".join(self._block), []
            self._turn_cost += _REQUEST_COST + len(block)
            self.on_headers(stream, block, self._block_end)

    def _check_header_block_size(self, size: int) -> None:
        if size > self.limits.max_header_block:
            raise _connection_error(
                H2ErrorCode.ENHANCE_YOUR_CALM,
                f"header block of more than {self.limits.max_header_block} bytes",
            )

    def _window_update(self, stream: int, payload: bytes) -> None:
        (increment,) = _NUMBER.unpack(_check_length(4, "WINDOW_UPDATE", payload))
        increment &= _STREAM_BITS
        if increment:
            self.on_window_update(stream, increment)
        elif stream:
            self.on_stream_error(stream, H2ErrorCode.PROTOCOL_ERROR)
        else:
            raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")

    def _settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if not self._settings_received:
                raise _connection_error(
                    H2ErrorCode.PROTOCOL_ERROR, "the first SETTINGS was an answer"
                )
            _check_length(0, "acknowledging SETTINGS", payload)
            self.on_settings_ack()
            return
        if len(payload) % _SETTING.size:
            raise _connection_error(
                H2ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes"
            )
        self._settings_received = True
        self.on_settings(list(_SETTING.iter_unpack(payload)))

    @abstractmethod
    def on_data(self, stream: int, piece: Piece, size: int, end: bool) -> None:
        """Called with data of a DATA frame, maybe a part; `size` counts against the window."""

    @abstractmethod
    def on_headers(self, stream: int, block: bytes, end: bool) -> None:
        """Called with a complete header block."""

    def on_request(self, request: RequestFrames) -> bool:
        """Called with the frames of a request, as `read_request` of `host.lane` describes them.

        Returns whether all of them are handled; otherwise, only the header block is.
        """
        self.on_headers(request[1], request[2], False)
        return False

    def on_messages(
        self, stop: int, stream: int, messages: Sequence[ReceivedMessage], size: int
    ) -> bool:
        """Called with a DATA frame of whole messages, as `read_messages` of `host.lane` has them.

        Returns whether it is handled.
        """
        return False

    @abstractmethod
    def on_settings(self, values: list[tuple[int, int]]) -> None:
        """Called with the client's settings."""

    @abstractmethod
    def on_settings_ack(self) -> None:
        """Called when the client acknowledges the server's settings."""

    @abstractmethod
    def on_ping(self, data: bytes, ack: bool) -> None:
        """Called with the eight bytes of a PING or of the answer to one."""

    @abstractmethod
    def on_window_update(self, stream: int, increment: int) -> None:
        """Called with a window increment of a stream, or of the connection if `stream` is 0."""

    @abstractmethod
    def on_rst_stream(self, stream: int) -> None:
        """Called when the client resets a stream."""

    @abstractmethod
    def on_goaway(self, code: int) -> None:
        """Called when the client will open no more streams."""

    @abstractmethod
    def on_no_op_frame(self) -> None:
        """Called for a frame without effect."""

    @abstractmethod
    def on_stream_error(self, stream: int, code: H2ErrorCode) -> None:
        """Called for a frame that breaks a rule of its stream."""


_STREAM_FRAMES = frozenset(
    (frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION)
)
_CONNECTION_FRAMES = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))


def _connection_error(code: H2ErrorCode, text: str) -> H2ConnectionError:
    return H2ConnectionError(code, text)


def _slice(data: bytes, start: int, stop: int) -> Piece:
    return data[start:stop] if stop - start < _MIN_VIEW_BYTES else memoryview(data)[start:stop]


def _check_length(size: int, name: str, payload: bytes) -> bytes:
    if len(payload) != size:
        raise _connection_error(
            H2ErrorCode.FRAME_SIZE_ERROR, f"{name} of {len(payload)} bytes, expected {size}"
        )
    return payload


def _strip_padding(payload: bytes) -> bytes:
    """Returns the payload without its padding."""
    if not payload:
        raise _connection_error(
            H2ErrorCode.FRAME_SIZE_ERROR, "padded frame without a padding length"
        )
    stop = len(payload) - payload[0]
    if stop < 1:
        raise _connection_error(H2ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1:stop]

"""An HTTP/2 client that sends any frame, as often as it likes, and reads all or nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType

import hpack
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from tests.conftest import DEADLINE, RunningHost

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService"


class HostileConnection:
    """One connection. `reads=False`: never takes a byte of what the server sends."""

    def __init__(
        self, host: RunningHost, settings: Mapping[int, int] | None = None, reads: bool = True
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", host.port), DEADLINE)
        self._encoder = hpack.Encoder()
        self._next_stream = 1
        self._received = bytearray()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._socket.sendall(PREFACE + SettingsFrame(0, settings=dict(settings or {})).serialize())
        if reads:
            self._reader.start()

    @property
    def socket(self) -> socket.socket:
        """The socket of the connection."""
        return self._socket

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._socket.recv(1 << 16):
                self._received += data
        self._closed.set()

    def send(self, frames: Iterable[Frame]) -> bool:
        """Sends frames; returns whether the server still takes them."""
        return self.send_bytes(b"".join(frame.serialize() for frame in frames))

    def send_bytes(self, data: bytes) -> bool:
        """Sends bytes; returns whether the server still takes them."""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return not self._closed.is_set()

    def headers(
        self,
        method: str = "ModelInfer",
        more: Iterable[tuple[str, str]] = (),
        flags: Iterable[str] = ("END_HEADERS",),
    ) -> HeadersFrame:
        """The frame that opens the next stream with a gRPC call."""
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"{SERVICE}/{method}"),
            (":authority", "x"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        ]
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        return HeadersFrame(stream, data=self._encoder.encode(fields), flags=list(flags))

    def call(self, message: bytes, more: Iterable[tuple[str, str]] = ()) -> list[Frame]:
        """The frames of a whole unary call, at most 16 KiB in each."""
        opened = self.headers(more=more)
        data = b"\0" + len(message).to_bytes(4, "big") + message
        parts = [data[start : start + 16384] for start in range(0, len(data), 16384)]
        frames = [DataFrame(opened.stream_id, part) for part in parts]
        frames[-1].flags.add("END_STREAM")
        return [opened, *frames]

    def received(self, data: bytes) -> bool:
        """Whether the server has sent these bytes."""
        return data in bytes(self._received)

    @property
    def closed(self) -> bool:
        """Whether the server has closed the connection."""
        return self._closed.is_set()

    def __enter__(self) -> HostileConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._reader.is_alive():
            self._reader.join(DEADLINE)

"""HTTP/2 by hand: what clients cannot be made to send, and what they do not show."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import NamedTuple

from tests.conftest import DEADLINE

SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
NO_ERROR, ENHANCE_YOUR_CALM = 0, 11


class Frame(NamedTuple):
    """One frame; of the flags, only what matters to PING and SETTINGS has a name."""

    kind: int
    flags: int
    payload: bytes

    @property
    def error(self) -> int:
        """The code in a GOAWAY."""
        code: int = struct.unpack(">I", self.payload[4:8])[0]
        return code


class Http2Connection:
    """A connection without calls. It acknowledges settings and sends nothing else by itself."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, b""))

    def ping(self, flags: int = 0, payload: bytes = b"12345678") -> None:
        """Sends a PING."""
        self._socket.sendall(_frame(PING, flags, payload))

    def next(self, *kinds: int) -> Frame | None:
        """The next frame of these kinds, None if the server closes the connection before that."""
        while (frame := self._read()) is not None:
            if frame.kind == SETTINGS and not frame.flags & ACK:
                self._socket.sendall(_frame(SETTINGS, ACK, b""))
            if frame.kind in kinds:
                return frame
        return None

    def _read(self) -> Frame | None:
        head = self._exactly(9)
        if head is None:
            return None
        payload = self._exactly(int.from_bytes(head[:3], "big"))
        return None if payload is None else Frame(head[3], head[4], payload)

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionError:
                part = b""
            if not part:
                return None
            data += part
        return data

    def __enter__(self) -> Http2Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 0]) + payload

"""Senders: each sends one request at a time, and measures the responses to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import msgspec

from host.frontends.grpc.protobuf_wire import read_varint
from host.load_generator.http1_connection import Http1Connection
from host.load_generator.http2_connection import CONNECTION_LOST, Http2Connection, Stream
from host.load_generator.job import Measured, Protocol

_FINAL = b"triton_final_response\x12\x02\x08\x01"  # an entry of the map of parameters, and true
_OUTPUTS_FIELD = 0x2A  # field 5 of ModelInferResponse
_DONE = b"[DONE]"


class Chain:
    """Requests that are sent in their order, again and again.

    `end`: of a sequence, the request that ends it early.
    """

    __slots__ = ("_end", "_position", "_requests")

    def __init__(self, requests: Sequence[bytes], end: bytes = b"") -> None:
        self._requests = requests
        self._end = end
        self._position = 0

    @property
    def is_open(self) -> bool:
        """Whether it is a sequence that has begun and has not ended."""
        return self._position > 0 and bool(self._end)

    def cut_off(self) -> None:
        """Makes the request that ends the sequence the next one."""
        self._requests, self._position = [self._end], 0

    def next(self) -> bytes:
        """Returns the next request."""
        request = self._requests[self._position]
        self._position += 1
        if self._position == len(self._requests):
            self._position = 0
        return request


class Sender(ABC):
    """Sends a request after the other over a connection. `on_free` is called when each has ended.

    Attributes:
        measured: where results are added; the load replaces it for each slice.
    """

    __slots__ = ("_on_free", "_due", "_first", "_last", "_count", "_failure", "busy", "chain",
                 "connection", "measured", "sent")  # fmt: skip

    connection: Any

    def __init__(
        self, connection: Any, chain: Chain, measured: Measured, on_free: Callable[[Any], None]
    ) -> None:
        self.use_connection(connection)
        self.chain = chain
        self._on_free = on_free
        self._due = self._first = self._last = self.sent = 0.0
        self._count = 0
        self._failure: tuple[str, str] | None = None
        self.busy = False
        self.measured = measured

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether a request can be sent now."""

    def use_connection(self, connection: Any) -> None:
        """Uses another connection from now on; no request is in flight."""
        self.connection = connection

    def send(self, due: float, now: float) -> None:
        """Sends the next request, which was due at that time."""
        self._due, self.sent = due, now
        self._count = 0
        self._failure = None
        self.busy = True
        self._transmit(self.chain.next())

    @abstractmethod
    def _transmit(self, request: bytes) -> None: ...

    def abandon(self) -> None:
        """Gives the request up, whose time is over."""
        self._cancel()
        self.on_end("timeout", "no last response in time")

    @abstractmethod
    def _cancel(self) -> None: ...

    def on_message(self, message: bytes) -> None:
        """Reads a response of several."""
        self._respond()

    def _respond(self) -> None:
        """Takes the time of a response."""
        now = perf_counter()
        if self._count:
            self.measured.gaps.append(now - self._last)
        else:
            self._first = now
        self._last = now
        self._count += 1

    def on_end(self, status: str, message: str) -> None:
        """The request has ended."""
        if not self.busy:
            return
        self.busy = False
        now, measured = perf_counter(), self.measured
        if status or self._failure is not None:
            measured.count_failure(*(self._failure or (status, message)))
        else:
            measured.latencies.append(now - self._due)
            if self._count:
                measured.first.append(self._first - self._due)
                measured.responses += self._count
            else:
                measured.responses += 1
        self._on_free(self)


class GrpcSender(Sender):
    """Sends with ModelInfer: each request has its own stream of a shared connection."""

    __slots__ = ("_stream",)

    connection: Http2Connection
    _stream: Stream | None

    def use_connection(self, connection: Any) -> None:
        """Uses a connection from now on; a stream of the last one is no more of use."""
        self._stream = None
        super().use_connection(connection)

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open and the server takes another stream."""
        return self.connection.has_room and self.connection.is_open

    def _transmit(self, request: bytes) -> None:
        self._stream = self.connection.send_request(request, self)

    def _cancel(self) -> None:
        if self._stream is not None:
            self.connection.cancel_call(self._stream)


class GrpcStreamSender(Sender):
    """Sends with ModelStreamInfer: one stream for all requests; it is opened again if it ends."""

    __slots__ = ("_stream",)

    connection: Http2Connection
    _stream: Stream | None

    def __init__(self, *arguments: Any) -> None:
        self._stream = None
        super().__init__(*arguments)

    def use_connection(self, connection: Any) -> None:
        """Uses a connection from now on; the stream on the last one is given up."""
        self._cancel()
        super().use_connection(connection)

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open, and there is a stream or room for it."""
        connection = self.connection
        return connection.is_open and (self._stream is not None or connection.has_room)

    def _transmit(self, request: bytes) -> None:
        if self._stream is None:
            self._stream = self.connection.start_call(self, reads_messages=True)
        self.connection.send_message(self._stream, request)

    def _cancel(self) -> None:
        if self._stream is not None:
            self.connection.cancel_call(self._stream)
            self._stream = None

    def on_message(self, message: bytes) -> None:
        """Reads a ModelStreamInferResponse."""
        if message[:1] == b"\x0a":
            self._failure = ("stream error", _read_error(message))
            # Whether more responses follow depends on the error: the next request has a new stream.
            self._cancel()
            super().on_end("", "")
        elif _FINAL in message:
            if _has_outputs(message):
                self._respond()
            super().on_end("", "")
        else:
            self._respond()

    def on_end(self, status: str, message: str) -> None:
        """The stream has ended, and with it the request."""
        self._stream = None
        super().on_end(status or CONNECTION_LOST, message or "the server has ended the stream")


def _read_error(message: bytes) -> str:
    length, position = read_varint(message, 1)
    return message[position : position + length].decode("utf-8", "replace")


def _has_outputs(message: bytes) -> bool:
    """Whether the ModelInferResponse in a stream's message has outputs."""
    _, position = read_varint(message, 1)
    while position < len(message):
        tag = message[position]
        if tag == _OUTPUTS_FIELD:
            return True
        length, start = read_varint(message, position + 1)  # all fields are texts or messages
        position = start + length
    return False


class HttpSender(Sender):
    """Sends over a connection of its own, and reads one response, or server-sent events."""

    __slots__ = ()

    connection: Http1Connection

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open."""
        return self.connection.is_open

    def _transmit(self, request: bytes) -> None:
        self.connection.send_request(request, self)

    def _cancel(self) -> None:
        self.connection.close()

    def on_message(self, message: bytes) -> None:
        """Reads an event of `/v1`; an event without text is no token."""
        if message.startswith(_DONE):
            return
        try:
            event = _decode_event(message)
        except msgspec.MsgspecError:
            self._failure = ("no event", "a server-sent event is no JSON of /v1")
            return
        if event.error is not None:
            self._failure = ("error event", str(event.error))
        elif any(choice.text or choice.delta.content for choice in event.choices):
            self._respond()


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode

SENDERS = {
    Protocol.GRPC: GrpcSender,
    Protocol.GRPC_STREAM: GrpcStreamSender,
    Protocol.HTTP: HttpSender,
    Protocol.HTTP_EVENTS: HttpSender,
}

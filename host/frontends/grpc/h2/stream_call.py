"""A gRPC call on an HTTP/2 stream with any number of messages in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

from host.frontends.error_status import RETRY_METADATA
from host.frontends.grpc.h2 import grpc_messages
from host.frontends.grpc.h2.calls import (
    OK_TRAILERS,
    SERVER_STOPPED,
    GrpcCall,
    Rpc,
    encode_small_message,
)
from host.frontends.grpc.h2.grpc_messages import (
    PREFIX,
    MessageReader,
    ReceivedMessage,
    RpcError,
    StatusCode,
    compress,
    decompress,
)
from host.frontends.grpc.h2.h2_stream import JOIN_UP_TO, NO_DEADLINE
from host.frontends.grpc.methods import StreamHandler, StreamMethod
from host.frontends.receive_memory import Piece, ReservedBytes


class StreamCall(GrpcCall):
    """A streaming call: passes messages to a StreamHandler, and is its StreamWriter.

    Reading pauses while the handler accepts no message, or a compressed message is being
    decompressed. Bytes that arrive meanwhile are acknowledged when reading continues.
    """

    rpc: Rpc[StreamMethod]
    _reader: MessageReader
    _handler: StreamHandler | None = None  # None when the call has ended
    _reading_paused = False
    _tasks: set[asyncio.Future[None]]  # that compress or decompress

    @property
    def incoming_bytes(self) -> int | None:
        """Bytes received while a message is incomplete and the client may send the rest."""
        return (
            None
            if self._reader.at_message_boundary or self.unacknowledged_bytes
            else self._reader.bytes_received
        )

    @property
    def at_message_boundary(self) -> bool:  # type: ignore[override]
        """Whether no message is incomplete."""
        return self._reader.at_message_boundary

    def mark_closed(self) -> None:
        """Drops the pending data and the messages that the handler has not taken."""
        super().mark_closed()
        self._reader.discard()

    def on_opened(self) -> None:
        """Opens the handler."""
        super().on_opened()
        connection, method = self.connection, self.rpc.method
        self._reader = MessageReader(
            connection.limits.max_message_size, connection.receive_budget, method.places_tensors
        )
        self._tasks = set()
        try:
            self._handler = self._running = method.open_stream(self, self.rpc)
        except Exception as error:  # a bug is logged and ends this call only
            self._send_error(error)

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Passes complete messages to the handler."""
        self.unacknowledged_bytes += size
        try:
            self._reader.feed(piece)
        except RpcError as fault:
            self._end_and_cancel(fault)
            return
        self._deliver_messages()

    def on_messages(self, messages: Sequence[ReceivedMessage], size: int) -> None:
        """Passes messages to the handler."""
        self.unacknowledged_bytes += size
        self._reader.add_messages(messages, size)
        self._deliver_messages()

    def _deliver_messages(self) -> None:
        """Passes complete messages to the handler until it pauses reading."""
        messages = self._reader.messages
        try:
            while messages and not self._reading_paused and self._handler is not None:
                flag, message, reserved = messages.popleft()
                if flag:
                    self._reading_paused = True
                    self._start_task(self._decompress_and_deliver(message, reserved))
                else:
                    self._reading_paused = not self._handler.message_received(message, reserved)
            if messages:
                return
            if self.unacknowledged_bytes:
                size, self.unacknowledged_bytes = self.unacknowledged_bytes, 0
                self.acknowledge_received_data(size)
            if self.remote_ended and not self._reading_paused and self._handler is not None:
                if not self._reader.at_message_boundary:
                    raise RpcError(StatusCode.INTERNAL, "the stream ended inside of a message")
                self._handler.half_closed()
        except Exception as error:  # a bug, as above
            self._abort_with_error(error)

    def resume_reading(self) -> None:
        """Goes on with the next message."""
        self._reading_paused = False
        self._deliver_messages()
        self.connection.send_buffer.flush_soon()

    def write_message(self, message: bytes, more: bool) -> bool:
        """Sends a message, as described by StreamWriter."""
        if self.rpc.response_encoding:
            self._start_task(self._write_compressed(message))
            return False
        size = PREFIX.size + len(message)
        send_buffer = self.connection.send_buffer
        if (
            size > JOIN_UP_TO
            or size > self.send_window
            or size > send_buffer.window
            or self.pending_bytes
            or send_buffer.writing_paused
            or not self._headers_sent
            or self.closed
        ):
            return self._write_message(PREFIX.pack(0, len(message)), message, more)
        self.send_window -= size
        send_buffer.window -= size
        send_buffer.data_frames_sent += 1
        several = more or len(self.connection.streams) > 1
        send_buffer.send_small(encode_small_message(self.id, message), several)
        return True

    def _write_message(self, prefix: bytes, body: bytes, more: bool) -> bool:
        if not self._headers_sent:
            self._send_response_headers()
        self.send_data(prefix, body)
        send_buffer = self.connection.send_buffer
        if more or len(self.connection.streams) > 1:
            send_buffer.flush_soon()
        else:
            send_buffer.flush()
        if self.pending_bytes <= self.connection.limits.max_send_queue:
            return True
        self.on_writable = self._resume_writing
        return False

    def _resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def finish_stream(self, error: Exception | None = None, retry: int | None = None) -> None:
        """Ends the call, with an error or with OK; `retry` as in `StreamWriter`."""
        self._handler = self._running = None
        if self.closed:
            return
        if error is not None:
            self._send_error(error)
            return
        self.deadline = NO_DEADLINE
        trailers = OK_TRAILERS
        if retry is not None:
            trailers += grpc_messages.hpack_field(RETRY_METADATA, b"%d" % retry)
        self.send_trailers(
            trailers if self._headers_sent else grpc_messages.RESPONSE_HEADERS + trailers
        )
        self.connection.send_buffer.flush()

    async def _decompress_and_deliver(self, message: bytes, reserved: ReservedBytes | None) -> None:
        connection = self.connection
        reserved = reserved or ReservedBytes(connection.receive_budget)
        most = connection.limits.max_message_size
        message = await decompress(message, self.rpc.encoding, most, reserved)
        if self._handler is not None and self._handler.message_received(message, reserved):
            self.resume_reading()

    async def _write_compressed(self, message: bytes) -> None:
        if self._write_message(*await compress(message, self.rpc.response_encoding), True):
            self._resume_writing()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_finished)

    def _task_finished(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if self._handler is None:
            return  # the call has ended and cancelled its tasks
        if task.cancelled():
            self._abort_with_error(RpcError(StatusCode.UNAVAILABLE, SERVER_STOPPED))
        elif (error := task.exception()) is not None:
            self._abort_with_error(error)

    def _abort_with_error(self, error: BaseException) -> None:
        """Ends the call with an error and cancels the handler."""
        self._send_error(error)
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        self._handler = None
        super()._cancel_handler()
        for task in self._tasks:
            task.cancel()

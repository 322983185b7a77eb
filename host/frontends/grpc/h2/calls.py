"""gRPC calls on HTTP/2 streams: unary calls, streaming calls and refused calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine

from host.errors import HostError
from host.frontends.grpc.h2 import status
from host.frontends.grpc.h2.frames import H2ErrorCode
from host.frontends.grpc.h2.messages import PREFIX, MessageReader, compress, decompress
from host.frontends.grpc.h2.rpc import Rpc
from host.frontends.grpc.h2.status import RpcError, StatusCode
from host.frontends.grpc.h2.stream import Stream, StreamConnection
from host.frontends.grpc.methods import (
    GRPC_STATUS,
    RETRY_METADATA,
    Cancellable,
    StreamHandler,
    StreamMethod,
    UnaryMethod,
    retry_milliseconds,
    to_host_error,
)
from host.frontends.receive_budget import ReservedBytes
from host.frontends.receive_buffer import Piece

_OK_TRAILERS = status.trailers(0)
_TOO_SLOW = "The request did not arrive in time"
_SERVER_STOPPED = "the server has stopped before it could answer"
# gRPC's clients may drop a response whose fields take more than half of what they announce.
_STATUS_OVERHEAD = 256  # bytes of the other fields, with 32 more for each
_MIN_STATUS_MESSAGE, _MAX_STATUS_MESSAGE = 64, 65536  # bytes


class _Call(Stream):
    """Base class of unary and streaming calls: the deadline, and how a call ends."""

    __slots__ = ("rpc", "_running", "_deadline", "_headers_sent")

    def __init__(self, connection: StreamConnection, stream_id: int, rpc: Rpc) -> None:
        super().__init__(connection, stream_id)
        self.rpc = rpc
        self._running: Cancellable | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._headers_sent = False
        if rpc.timeout is not None:
            self._deadline = connection.loop.call_later(rpc.timeout, self._deadline_exceeded)

    def on_aborted(self) -> None:
        """Cancels the handler, as the client or the connection has gone."""
        self._cancel_deadline()
        self._cancel_handler()

    def end_unavailable(self, text: str = _SERVER_STOPPED) -> None:
        """Ends the call with UNAVAILABLE and cancels the handler."""
        self._end_and_cancel(RpcError(StatusCode.UNAVAILABLE, text))

    def on_too_slow(self) -> None:
        """Ends the call with DEADLINE_EXCEEDED, as the request came too slowly."""
        self._end_and_cancel(RpcError(StatusCode.DEADLINE_EXCEEDED, _TOO_SLOW))
        self.connection.send_buffer.flush()

    def _send_response_headers(self) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            encoding = self.rpc.response_encoding
            self.send_headers(
                status.response_headers(encoding) if encoding else status.RESPONSE_HEADERS
            )

    def _send_error(self, error: BaseException) -> None:
        """Ends the call with the status of an error."""
        if self.closed:
            return
        self._cancel_deadline()
        if isinstance(error, RpcError):
            code, text = int(error.code), error.message
        else:
            host_error = to_host_error(error)
            code, text = GRPC_STATUS[host_error.code], host_error.message
        list_size = self.connection.send_buffer.max_header_list_size
        most = _MAX_STATUS_MESSAGE
        if list_size:
            most = min(most, max(_MIN_STATUS_MESSAGE, list_size // 2 - _STATUS_OVERHEAD))
        block = status.trailers(code, text, most)
        retry = retry_milliseconds(error)
        if retry is not None:
            block += status.hpack_field(RETRY_METADATA, b"%d" % retry)
        self.send_trailers(block if self._headers_sent else status.RESPONSE_HEADERS + block)
        self.connection.send_buffer.flush()

    def _end_and_cancel(self, fault: RpcError) -> None:
        """Ends the call with a status and cancels the handler."""
        if self.pending_bytes:  # the client is not reading, so it would not get a status
            self.reset(H2ErrorCode.CANCEL)
            self.connection.send_buffer.flush()
        else:
            self._send_error(fault)
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def _deadline_exceeded(self) -> None:
        self._deadline = None
        self._end_and_cancel(RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class UnaryCall(_Call):
    """A call with one request message and one response message."""

    __slots__ = ("_method", "_reader", "_reserved")

    def __init__(
        self, connection: StreamConnection, stream_id: int, rpc: Rpc, method: UnaryMethod
    ) -> None:
        super().__init__(connection, stream_id, rpc)
        self._method = method
        self._reader: MessageReader | None = None
        self._reserved: ReservedBytes | None = None  # until the response, if there is no Call

    def on_opened(self) -> None:
        """Does nothing: the call starts when its message is complete."""

    @property
    def incoming_bytes(self) -> int | None:
        """Bytes received until the client has ended the request; None after that."""
        if self.remote_ended:
            return None
        return 0 if self._reader is None else self._reader.bytes_received

    @property
    def unread_bytes(self) -> int:
        """Bytes of the response that wait for the client's window."""
        return self.pending_bytes

    def mark_closed(self) -> None:
        """Drops the pending data, the message and the deadline."""
        super().mark_closed()
        self._reserved = None
        if self._reader is not None:
            self._reader.discard()
        if self._deadline is not None:
            self._cancel_deadline()

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Starts the call when its message is complete."""
        (self.connection if end else self).acknowledge_received_data(size)
        reader = self._reader
        if reader is None:
            if end and len(piece) >= PREFIX.size:  # nearly always, one piece is the whole message
                flag, length = PREFIX.unpack_from(piece)
                if length == len(piece) - PREFIX.size:
                    message = bytes(piece[PREFIX.size :])
                    self._handle_message(flag, message, None)
                    return
            connection = self.connection
            reader = self._reader = MessageReader(
                connection.limits.max_message_size,
                connection.receive_budget,
                self._method.reserve_block,
            )
        try:
            reader.feed(piece)
            if len(reader.messages) > 1 or (reader.messages and not reader.at_message_boundary):
                raise RpcError(StatusCode.INTERNAL, "more than one message in a unary call")
            if end:
                if not reader.messages or not reader.at_message_boundary:
                    raise RpcError(
                        StatusCode.INTERNAL, "a unary call ended without a whole message"
                    )
                self._handle_message(*reader.messages.popleft())
        except RpcError as fault:
            self._send_error(fault)

    def _handle_message(self, flag: int, message: bytes, reserved: ReservedBytes | None) -> None:
        method = self._method
        if flag:
            self._run_task(self._decompress_and_handle(message, reserved))
            return
        if method.callback_handler is None:
            self._reserved = reserved
            self._run_task(method.handler(message, self.rpc))
            return
        try:
            running = method.callback_handler(message, self._done, self.rpc, reserved)
        except Exception as error:  # a bug is logged and ends this call only
            self._send_error(error)
            return
        if not self.closed:
            self._running = running

    async def _decompress_and_handle(self, message: bytes, reserved: ReservedBytes | None) -> bytes:
        connection = self.connection
        reserved = self._reserved = reserved or ReservedBytes(connection.receive_budget)
        most = connection.limits.max_message_size
        message = await decompress(message, self.rpc.encoding, most, reserved)
        return await self._method.handler(message, self.rpc)

    def _run_task(self, work: Awaitable[bytes]) -> None:
        task = asyncio.ensure_future(work)
        self._running = task
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Future[bytes]) -> None:
        self._running = None  # else an error would keep the message, by its traceback
        if task.cancelled():
            self._send_error(RpcError(StatusCode.UNAVAILABLE, _SERVER_STOPPED))
            return
        error = task.exception()
        if error is None:
            self._done(task.result())
        elif not self.closed:
            self._send_error(error)

    def _done(self, result: bytes | HostError) -> None:
        self._running = None
        if self.closed:
            return
        if isinstance(result, HostError):
            self._send_error(result)
        elif self.rpc.response_encoding:
            task = asyncio.ensure_future(self._send_compressed(result))
            self._running = task
        else:
            self._send_message(PREFIX.pack(0, len(result)), result)

    async def _send_compressed(self, message: bytes) -> None:
        self._send_message(*await compress(message, self.rpc.response_encoding))

    def _send_message(self, prefix: bytes, body: bytes) -> None:
        encoding = self.rpc.response_encoding
        head = status.response_headers(encoding) if encoding else status.RESPONSE_HEADERS
        self.send_response(head, prefix, body, _OK_TRAILERS)
        # Other calls may be answered in this iteration too: send their responses together.
        if self.connection.streams:
            self.connection.send_buffer.flush_soon()
        else:
            self.connection.send_buffer.flush()


class StreamCall(_Call):
    """A streaming call: passes messages to a StreamHandler, and is its StreamWriter.

    Reading pauses while the handler accepts no message, or a compressed message is being
    decompressed. Bytes that come meanwhile are acknowledged when reading goes on.
    """

    __slots__ = ("_method", "_reader", "_handler", "_reading_paused", "_tasks")

    def __init__(
        self, connection: StreamConnection, stream_id: int, rpc: Rpc, method: StreamMethod
    ) -> None:
        super().__init__(connection, stream_id, rpc)
        self._method = method
        self._reader = MessageReader(
            connection.limits.max_message_size, connection.receive_budget, method.reserve_block
        )
        self._handler: StreamHandler | None = None  # None when the call has ended
        self._reading_paused = False
        self._tasks: set[asyncio.Future[None]] = set()  # that compress or decompress

    @property
    def incoming_bytes(self) -> int | None:
        """Bytes received while a message is incomplete and the client may send the rest."""
        return (
            None
            if self._reader.at_message_boundary or self.unacknowledged_bytes
            else self._reader.bytes_received
        )

    def mark_closed(self) -> None:
        """Drops the pending data and the messages that the handler has not taken."""
        super().mark_closed()
        self._reader.discard()

    def on_opened(self) -> None:
        """Opens the handler."""
        try:
            self._handler = self._running = self._method.open_stream(self, self.rpc)
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
        return self._write_message(PREFIX.pack(0, len(message)), message, more)

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
        self._cancel_deadline()
        trailers = _OK_TRAILERS
        if retry is not None:
            trailers += status.hpack_field(RETRY_METADATA, b"%d" % retry)
        self.send_trailers(trailers if self._headers_sent else status.RESPONSE_HEADERS + trailers)
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
            self._abort_with_error(RpcError(StatusCode.UNAVAILABLE, _SERVER_STOPPED))
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


class RefusedCall(Stream):
    """A request that is answered with an error before its data is read."""

    __slots__ = ("_block",)

    def __init__(self, connection: StreamConnection, stream_id: int, block: bytes) -> None:
        super().__init__(connection, stream_id)
        self._block = block

    def on_opened(self) -> None:
        """Sends the error."""
        self.send_trailers(self._block)

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Drops the data."""
        self.acknowledge_received_data(size)

    def on_aborted(self) -> None:
        """Does nothing: no work was started."""

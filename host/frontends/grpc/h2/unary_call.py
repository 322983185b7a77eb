"""A gRPC call on an HTTP/2 stream with one request message and one response message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from host.errors import HostError
from host.frontends.grpc.h2.calls import (
    OK_TRAILERS,
    SERVER_STOPPED,
    GrpcCall,
    Rpc,
    encode_small_response,
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
from host.frontends.grpc.h2.h2_stream import JOIN_UP_TO
from host.frontends.grpc.methods import UnaryMethod
from host.frontends.receive_memory import Piece, ReservedBytes


class UnaryCall(GrpcCall):
    """A call with one request message and one response message."""

    rpc: Rpc[UnaryMethod]
    takes_message = True
    _reader: MessageReader | None = None
    _reserved: ReservedBytes | None = None  # until the response, if there is no Call

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
        """Drops the pending data and the message."""
        self.closed = True
        self._reserved = None
        if self._pending is not None:
            self.drop_pending()
        if self._reader is not None:
            self._reader.discard()

    def on_data(self, piece: Piece, size: int, end: bool) -> None:
        """Starts the call when its message is complete."""
        flag, length = -1, 0
        if end and self._reader is None and len(piece) >= PREFIX.size:
            flag, length = PREFIX.unpack_from(piece)
        if flag >= 0 and length == len(piece) - PREFIX.size:  # nearly always, this is all of it
            self.connection.unacknowledged_bytes += size
            message, reserved = bytes(piece[PREFIX.size :]), None
        else:
            (self.connection if end else self).acknowledge_received_data(size)
            try:
                read = self._read_message(piece, end)
            except RpcError as fault:
                self._send_error(fault)
                return
            if read is None:
                return
            flag, message, reserved = read
        if flag:
            self._run_task(self._decompress_and_handle(message, reserved))
        else:
            self.on_message(message, reserved)

    def on_message(self, message: bytes, reserved: ReservedBytes | None = None) -> None:
        """Starts the call; `reserved` is the memory of the message, if it is counted."""
        method = self.rpc.method
        if method.callback_handler is None:
            self._reserved = reserved
            self._run_task(method.handler(message, self.rpc))
            return
        try:
            running = method.callback_handler(message, self._done, self.rpc, reserved)
        except Exception as error:  # a bug is logged and ends this call only
            self._send_error(error)
            return
        if not self.closed and self._running is None:  # else its response is being compressed
            self._running = running

    def _read_message(self, piece: Piece, end: bool) -> ReceivedMessage | None:
        """Returns the message when it is complete. Raises RpcError if it is not the only one."""
        reader = self._reader
        if reader is None:
            connection = self.connection
            reader = self._reader = MessageReader(
                connection.limits.max_message_size,
                connection.receive_budget,
                self.rpc.method.places_tensors,
            )
        reader.feed(piece)
        if len(reader.messages) > 1 or (reader.messages and not reader.at_message_boundary):
            raise RpcError(StatusCode.INTERNAL, "more than one message in a unary call")
        if not end:
            return None
        if not reader.messages or not reader.at_message_boundary:
            raise RpcError(StatusCode.INTERNAL, "a unary call ended without a whole message")
        return reader.messages.popleft()

    async def _decompress_and_handle(self, message: bytes, reserved: ReservedBytes | None) -> bytes:
        connection = self.connection
        reserved = self._reserved = reserved or ReservedBytes(connection.receive_budget)
        most = connection.limits.max_message_size
        message = await decompress(message, self.rpc.encoding, most, reserved)
        return await self.rpc.method.handler(message, self.rpc)

    def _run_task(self, work: Awaitable[bytes]) -> None:
        task = asyncio.ensure_future(work)
        self._running = task
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Future[bytes]) -> None:
        self._running = None  # else an error would keep the message, by its traceback
        if task.cancelled():
            self._send_error(RpcError(StatusCode.UNAVAILABLE, SERVER_STOPPED))
            return
        error = task.exception()
        if error is None:
            self._done(task.result())
        elif not self.closed:
            self._send_error(error)

    def _done(self, result: bytes | HostError) -> None:
        """Sends the response, in one write if it is small and nothing is in its way."""
        self._running = None
        if self.closed:
            return
        if not isinstance(result, bytes):
            self._send_error(result)
            return
        if self.rpc.response_encoding:
            self._running = asyncio.ensure_future(self._send_compressed(result))
            return
        connection = self.connection
        send_buffer = connection.send_buffer
        length = len(result)
        size = PREFIX.size + length
        several = len(connection.streams) > 1
        if (
            size > JOIN_UP_TO
            or size > self.send_window
            or size > send_buffer.window
            or send_buffer.writing_paused
            or send_buffer.waiting_streams
        ):
            self._send_message(PREFIX.pack(0, length), result)
            if several:
                send_buffer.flush_soon()
            else:
                send_buffer.flush()
            return
        send_buffer.window -= size
        send_buffer.data_frames_sent += 1
        # Other calls may be answered in this iteration too: their responses are sent together.
        send_buffer.send_small(encode_small_response(self.id, result), several)
        if not self.remote_ended:
            connection.stop_request(self)
            send_buffer.flush_soon()
        connection.remove_stream(self)

    async def _send_compressed(self, message: bytes) -> None:
        self._send_message(*await compress(message, self.rpc.response_encoding))
        self.connection.send_buffer.flush()

    def _send_message(self, prefix: bytes, body: bytes) -> None:
        self._send_response_headers()
        self.send_data(prefix, body)
        self.send_trailers(OK_TRAILERS)

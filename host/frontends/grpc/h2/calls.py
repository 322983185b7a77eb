"""Calls of gRPC, each of them a stream of HTTP/2: unary ones, streams, and those refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING

from host.errors import HostError
from host.frontends.grpc.h2 import status
from host.frontends.grpc.h2.frames import ErrorCode
from host.frontends.grpc.h2.messages import PREFIX, MessageReader, compress, decompress
from host.frontends.grpc.h2.reader import Piece
from host.frontends.grpc.h2.rpc import Rpc
from host.frontends.grpc.h2.status import Code, RpcFault
from host.frontends.grpc.h2.stream import Stream
from host.frontends.grpc.methods import (
    STATUS,
    Cancellable,
    Serving,
    StreamMethod,
    UnaryMethod,
    failure,
)

if TYPE_CHECKING:
    from host.frontends.grpc.h2.connection import Connection

_OK = status.trailers(0)
_LATE = "The request did not arrive in time"
_STOPPED = "the server has stopped before it could answer"
_MESSAGE_PART = 2  # of the header list that a client takes, a status text gets one in so many


class _Call(Stream):
    """What unary calls and streams have in common: a deadline, and how they end."""

    __slots__ = ("rpc", "_running", "_deadline", "_answered")

    def __init__(self, connection: Connection, stream_id: int, rpc: Rpc) -> None:
        super().__init__(connection, stream_id)
        self.rpc = rpc
        self._running: Cancellable | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._answered = False  # the head of the response is sent
        if rpc.timeout is not None:
            self._deadline = connection.loop.call_later(rpc.timeout, self._expire)

    def aborted(self) -> None:
        """Nobody waits for it: what works on it is cancelled."""
        self._stop_deadline()
        self._stop()

    def unavailable(self, text: str = _STOPPED) -> None:
        """The connection ends, as the text says, or the server does."""
        self._end_early(RpcFault(Code.UNAVAILABLE, text))

    def too_slow(self) -> None:
        """The client is not waited for any longer."""
        self._end_early(RpcFault(Code.DEADLINE_EXCEEDED, _LATE))
        self.connection.out.flush()

    def _answer(self) -> None:
        if not self._answered:
            self._answered = True
            encoding = self.rpc.reply_encoding
            self.send_headers(status.response(encoding) if encoding else status.RESPONSE)

    def _fail(self, error: BaseException) -> None:
        """End with what was raised."""
        if self.closed:
            return
        self._stop_deadline()
        if isinstance(error, RpcFault):
            code, text = int(error.code), error.message
        else:
            told = failure(error)
            code, text = STATUS[told.code], told.message
        most = self.connection.out.header_list // _MESSAGE_PART
        block = status.trailers(code, text, most)
        self.finish(block if self._answered else status.RESPONSE + block)
        self.connection.out.flush()

    def _end_early(self, fault: RpcFault) -> None:
        """End with a status while the handler still works on it."""
        if self.pending_bytes:  # the client does not even take what is there
            self.reset(ErrorCode.CANCEL)
            self.connection.out.flush()
        else:
            self._fail(fault)
        self._stop()

    def _stop(self) -> None:
        """Cancel what works on it."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def _expire(self) -> None:
        self._deadline = None
        self._end_early(RpcFault(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class UnaryCall(_Call):
    """One message in, one out."""

    __slots__ = ("_method", "_reader")

    def __init__(
        self, connection: Connection, stream_id: int, rpc: Rpc, method: UnaryMethod
    ) -> None:
        super().__init__(connection, stream_id, rpc)
        self._method = method
        self._reader: MessageReader | None = None

    def begin(self) -> None:
        """Its message is to come."""

    @property
    def arriving(self) -> int | None:
        """Until its one message is there, with the end of the stream."""
        if self.remote_ended:
            return None
        return 0 if self._reader is None else self._reader.taken

    def received(self, piece: Piece, size: int, end: bool) -> None:
        """Serve the call once its message is there."""
        (self.connection if end else self).credit(size)
        reader = self._reader
        if reader is None:
            if end and len(piece) >= PREFIX.size:  # nearly always: it came in one piece
                flag, length = PREFIX.unpack_from(piece)
                if length == len(piece) - PREFIX.size:
                    message = bytes(piece[PREFIX.size :])
                    if flag:
                        self._serve(flag, message)
                    else:
                        self._start(message)
                    return
            reader = self._reader = MessageReader(self.connection.limits.max_message)
        try:
            reader.feed(piece)
            if len(reader.ready) > 1 or (reader.ready and not reader.between):
                raise RpcFault(Code.INTERNAL, "more than one message in a unary call")
            if end:
                if not reader.ready or not reader.between:
                    raise RpcFault(Code.INTERNAL, "a unary call ended without a whole message")
                self._serve(*reader.ready.popleft())
        except RpcFault as fault:
            self._fail(fault)

    def _serve(self, flag: int, message: bytes) -> None:
        if flag:
            self._run(self._unpack(message))
        else:
            self._start(message)

    def _start(self, message: bytes) -> None:
        method = self._method
        if method.start is None:
            self._run(method.handler(message, self.rpc))
            return
        try:
            running = method.start(message, self._done, self.rpc)
        except Exception as error:  # the top of a call: `failure` logs a defect, and it is answered
            self._fail(error)
            return
        if not self.closed:
            self._running = running

    async def _unpack(self, message: bytes) -> bytes:
        most = self.connection.limits.max_message
        message = await decompress(message, self.rpc.encoding, most)
        return await self._method.handler(message, self.rpc)

    def _run(self, work: Awaitable[bytes]) -> None:
        task = asyncio.ensure_future(work)
        self._running = task
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Future[bytes]) -> None:
        if task.cancelled():
            self._fail(RpcFault(Code.UNAVAILABLE, _STOPPED))
            return
        error = task.exception()
        if error is None:
            self._done(task.result())
        elif not self.closed:
            self._fail(error)

    def _done(self, result: bytes | HostError) -> None:
        self._running = None
        if self.closed:
            return
        if isinstance(result, HostError):
            self._fail(result)
        elif self.rpc.reply_encoding:
            task = asyncio.ensure_future(self._respond_compressed(result))
            self._running = task
        else:
            self._respond(PREFIX.pack(0, len(result)), result)

    async def _respond_compressed(self, message: bytes) -> None:
        self._respond(*await compress(message, self.rpc.reply_encoding))

    def _respond(self, prefix: bytes, body: bytes) -> None:
        if self._deadline is not None:
            self._stop_deadline()
        encoding = self.rpc.reply_encoding
        head = status.response(encoding) if encoding else status.RESPONSE
        self.respond(head, prefix, body, _OK)
        # Whoever has answered may have more answers for this client, or work to hand out first.
        if self.connection.streams:
            self.connection.out.flush_soon()
        else:
            self.connection.out.flush()


class StreamCall(_Call):
    """Messages both ways: the Client of what serves them, which is called as they come."""

    __slots__ = ("_method", "_reader", "_serving", "_full", "_work")

    def __init__(
        self, connection: Connection, stream_id: int, rpc: Rpc, method: StreamMethod
    ) -> None:
        super().__init__(connection, stream_id, rpc)
        self._method = method
        self._reader = MessageReader(connection.limits.max_message)
        self._serving: Serving | None = None  # until the stream has been ended
        self._full = False  # no message is taken now
        self._work: set[asyncio.Future[None]] = set()  # on compressed messages

    @property
    def arriving(self) -> int | None:
        """While a message has come only in part, and there is room for the rest."""
        return None if self._reader.between or self.held else self._reader.taken

    def begin(self) -> None:
        """Have it served."""
        try:
            self._serving = self._running = self._method.start(self, self.rpc)
        except Exception as error:  # the top of a call: `failure` logs a defect, and it is answered
            self._fail(error)

    def received(self, piece: Piece, size: int, end: bool) -> None:
        """Messages. While one is not taken, no new room is granted."""
        self.held += size
        try:
            self._reader.feed(piece)
        except RpcFault as fault:
            held, self.held = self.held, 0
            self.credit(held)
            self._end_early(fault)
            return
        self._hand_on()

    def _hand_on(self) -> None:
        """Pass on the messages that are there, as far as they are taken."""
        ready = self._reader.ready
        try:
            while ready and not self._full and self._serving is not None:
                flag, message = ready.popleft()
                if flag:
                    self._full = True
                    self._start(self._unpack(message))
                else:
                    self._full = not self._serving.received(message)
            if self.held and not ready:
                held, self.held = self.held, 0
                self.credit(held)
            if self.remote_ended and not ready and not self._full and self._serving is not None:
                if not self._reader.between:
                    raise RpcFault(Code.INTERNAL, "the stream ended inside of a message")
                self._serving.half_closed()
        except Exception as error:  # the top of a call, as above
            self._break_off(error)

    def read_on(self) -> None:
        """The next message is taken."""
        self._full = False
        self._hand_on()
        self.connection.out.flush_soon()

    def write(self, message: bytes, more: bool) -> bool:
        """Send a message, at once if no more may come; whether the next may follow."""
        if self.rpc.reply_encoding:
            self._start(self._write_compressed(message))
            return False
        return self._put(PREFIX.pack(0, len(message)), message, more)

    def _put(self, prefix: bytes, body: bytes, more: bool) -> bool:
        if not self._answered:
            self._answer()
        self.send(prefix, body)
        out = self.connection.out
        if more or len(self.connection.streams) > 1:
            out.flush_soon()
        else:
            out.flush()
        if self.pending_bytes <= self.connection.limits.send_queue:
            return True
        self.on_room = self._write_on
        return False

    def _write_on(self) -> None:
        if self._serving is not None:
            self._serving.write_on()

    def end(self, error: Exception | None = None) -> None:
        """End the stream."""
        self._serving = self._running = None
        if self.closed:
            return
        if error is not None:
            self._fail(error)
            return
        self._stop_deadline()
        self.finish(_OK if self._answered else status.RESPONSE + _OK)
        self.connection.out.flush()

    async def _unpack(self, message: bytes) -> None:
        most = self.connection.limits.max_message
        message = await decompress(message, self.rpc.encoding, most)
        if self._serving is not None and self._serving.received(message):
            self.read_on()

    async def _write_compressed(self, message: bytes) -> None:
        if self._put(*await compress(message, self.rpc.reply_encoding), True):
            self._write_on()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Future[None]) -> None:
        self._work.discard(task)
        if self._serving is None:
            return  # the stream is over, and has cancelled it
        if task.cancelled():
            self._break_off(RpcFault(Code.UNAVAILABLE, _STOPPED))
        elif (error := task.exception()) is not None:
            self._break_off(error)

    def _break_off(self, error: BaseException) -> None:
        """End with what was raised although it is being served."""
        self._fail(error)
        self._stop()

    def _stop(self) -> None:
        self._serving = None
        super()._stop()
        for task in self._work:
            task.cancel()


class Refusal(Stream):
    """A request that is answered with an error, whatever follows."""

    __slots__ = ("_block",)

    def __init__(self, connection: Connection, stream_id: int, block: bytes) -> None:
        super().__init__(connection, stream_id)
        self._block = block

    def begin(self) -> None:
        """Answer."""
        self.finish(self._block)

    def received(self, piece: Piece, size: int, end: bool) -> None:
        """Nobody reads it."""
        self.credit(size)

    def aborted(self) -> None:
        """Nothing was begun."""

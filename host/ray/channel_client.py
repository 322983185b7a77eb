"""The client's end of a connection to a replica of another deployment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from host.errors import unavailable
from host.frontends.request_headers import Header
from host.ray.channel_messages import (
    ACKNOWLEDGED_BYTES,
    ACKNOWLEDGED_RESPONSES,
    DECODE_ERRORS,
    FrameError,
    FrameKind,
    FrameReader,
    Refusal,
    ReplicaMethod,
    RequestHead,
    ResponseHead,
    decode_refusal,
    decode_response,
    encode_acknowledgement,
    encode_call,
    encode_frame,
    encode_message,
    encode_rpc,
)
from host.ray.channel_server import BUFFER_BYTES, ChannelAddress, greet_server, notice_lost_machine

_log = logging.getLogger("pbhost")

_CONNECT_SECONDS = 5.0

_Result = TypeVar("_Result")

Answer = tuple["ResponseHead | None", bool, Sequence[memoryview]]
"""The head of a response, whether it is the last one, and its tensors."""


class NotTakenError(Exception):
    """The replica has not begun the request, which may be sent to another one."""


class ChannelLostError(Exception):
    """The connection ended while the request was in progress."""


class Channel:
    """A connection for any number of requests at the same time. Belongs to one event loop."""

    def __init__(
        self,
        address: ChannelAddress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.address = address
        self.accepts = True
        """Whether new requests may be sent."""
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, Callable[[Any], None]] = {}  # where answers go
        self._last = 0
        self._taken = 0
        self._task = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def connect(cls, address: ChannelAddress) -> Channel:
        """Connects to a replica.

        Raises OSError, also if it does not answer in time, or does not know the secret.
        """
        try:
            reader, writer = await asyncio.wait_for(_open(address), _CONNECT_SECONDS)
        except asyncio.TimeoutError:
            raise OSError(f"no connection within {_CONNECT_SECONDS:g} s") from None
        return cls(address, reader, writer)

    @property
    def in_progress(self) -> int:
        """How many requests have not ended."""
        return len(self._calls)

    async def infer(
        self, head: RequestHead, buffers: Sequence[Any]
    ) -> AsyncGenerator[Answer | Refusal, None]:
        """Yields the responses; closing the generator cancels the request.

        Raises NotTakenError, and ChannelLostError.
        """
        number = self._next_number()
        frame = encode_message(FrameKind.REQUEST, number, head, buffers)
        answers: asyncio.Queue[Answer | Refusal | Exception] = asyncio.Queue()
        self._calls[number] = answers.put_nowait
        self._writer.write(frame)
        count = size = 0  # of responses that are not acknowledged
        try:
            await self._drain()
            while True:
                answer = await answers.get()
                if isinstance(answer, Refusal):
                    yield answer
                    return
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                if answer[1]:
                    return
                count += 1
                size += sum(map(len, answer[2]))
                if count >= ACKNOWLEDGED_RESPONSES or size >= ACKNOWLEDGED_BYTES:
                    self._send(encode_acknowledgement(number, count))
                    count = size = 0
        finally:
            if self._calls.pop(number, None) is not None:
                self._send(encode_frame(FrameKind.CANCEL, number))

    async def answer_rpc(self, message: bytes, metadata: Sequence[Header]) -> bytes:
        """The response of the replica to a ModelInfer of a client.

        Raises HostError, NotTakenError, and ChannelLostError.
        """
        number = self._next_number()
        response: bytes = await self._ask(number, encode_rpc(number, message, metadata))
        return response

    async def call(self, method: ReplicaMethod[_Result], *arguments: object) -> _Result:
        """The result of a method of the replica.

        Raises HostError for an error of the method, NotTakenError, and ChannelLostError.
        """
        number = self._next_number()
        encoded = await self._ask(number, encode_call(number, method.name, arguments))
        try:
            return method.decode_result(encoded)
        except DECODE_ERRORS as error:
            text = f"the result of '{method.name}' cannot be decoded: {error}"
            raise unavailable(text) from error

    def _next_number(self) -> int:
        if not self.accepts:
            raise NotTakenError
        self._last += 1
        return self._last

    async def _ask(self, number: int, frame: bytes) -> bytes:
        """Sends a call, and returns the contents of its only answer. Raises as `call`."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = lambda one: None if answer.done() else answer.set_result(one)
        self._writer.write(frame)
        try:
            await self._drain()
            result = await answer
        finally:
            if self._calls.pop(number, None) is not None:
                self._send(encode_frame(FrameKind.CANCEL, number))
        if isinstance(result, Refusal):
            raise result.to_error()
        if isinstance(result, Exception):
            raise result
        contents: bytes = result
        return contents

    def close(self) -> None:
        """Ends the connection; requests in progress end with ChannelLostError."""
        self._task.cancel()

    async def _drain(self) -> None:
        """Waits for a replica that reads slowly."""
        with suppress(OSError):  # the answer says how the connection has ended
            await self._writer.drain()

    def _send(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def _read(self) -> None:
        closed = False  # by the other side; all that it had said was read here before
        try:
            frames = FrameReader()
            while data := await self._reader.read(BUFFER_BYTES):
                for frame in frames.feed(data):
                    self._take_apart(*frame)
            closed = True
        except FrameError as error:
            _log.error("a connection to another replica ends: %s", error)
        except OSError as error:
            # What the other side had said may be lost, so it may have begun each request.
            _log.warning("a connection to another replica ends: %s", error)
        finally:
            self.accepts = False
            self._writer.close()
            calls, self._calls = self._calls, {}
            for number, answer in calls.items():
                begun = number <= self._taken or not closed
                answer(ChannelLostError() if begun else NotTakenError())

    def _take_apart(self, kind: int, number: int, contents: bytes) -> None:
        if kind == FrameKind.TAKEN:
            self._taken = number
        elif kind == FrameKind.GOODBYE:
            self.accepts = False
        elif kind in (FrameKind.RESPONSE, FrameKind.LAST_RESPONSE):
            final = kind == FrameKind.LAST_RESPONSE
            head, buffers = decode_response(contents)
            self._answer(number, (head, final, buffers), final)
        elif kind in (FrameKind.RESULT, FrameKind.RPC_RESPONSE):
            self._answer(number, contents, True)
        elif kind == FrameKind.REFUSAL:
            self._answer(number, decode_refusal(contents), True)
        elif kind == FrameKind.NOT_TAKEN:
            self._answer(number, NotTakenError(), True)
        else:
            raise FrameError(f"unexpected frame of kind {kind}")

    def _answer(self, number: int, answer: object, last: bool) -> None:
        deliver = self._calls.get(number)
        if deliver is None:
            return  # it was cancelled
        if last:
            del self._calls[number]
        deliver(answer)


async def _open(address: ChannelAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError."""
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=BUFFER_BYTES)
    try:
        notice_lost_machine(writer.get_extra_info("socket"))
        await greet_server(reader, writer, address.secret)
    except BaseException:  # also if it takes too long
        writer.close()
        raise
    return reader, writer

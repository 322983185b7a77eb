"""A replica's port for requests of other replicas, which reach it without Ray in between."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from host.errors import HostError, unavailable
from host.inference.request import InferRequest
from host.ray.channels.frames import (
    RESPONSE_WINDOW,
    RESPONSES_PER_ACKNOWLEDGEMENT,
    FrameError,
    FrameKind,
    decode_pickled,
    decode_request,
    encode_frame,
    encode_message,
    encode_pickled,
    encode_refusal,
    read_frame,
)
from host.ray.channels.handshake import SECRET_BYTES, accept_client
from host.ray.channels.keepalive import notice_lost_machine
from host.ray.channels.messages import Refusal, RequestHead, pack_response, unpack_request
from host.remote.provider import ResponseStream

_log = logging.getLogger("pbhost")

_HANDSHAKE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_SEND_SECONDS = 10.0
BUFFER_BYTES = 1 << 20
"""Bytes that a connection reads ahead."""

Infer = Callable[[InferRequest, Mapping[str, str]], ResponseStream]
Methods = Mapping[str, Callable[..., Awaitable[object]]]


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a replica takes requests, and the secret that a client has to know."""

    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ChannelServer:
    """Answers requests and calls of other replicas. Belongs to one event loop.

    `infer`: as that of `host.server.own_models.OwnModels`. `methods`: what others may call.
    """

    def __init__(self, infer: Infer, methods: Methods) -> None:
        self._infer = infer
        self.methods = methods
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._connections: dict[_ServedChannel, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self.stopping = False

    @property
    def ongoing(self) -> int:
        """Requests in progress. Ray Serve does not count them."""
        return sum(channel.requests for channel in self._connections)

    async def start(self, host: str) -> ChannelAddress:
        """Listens on a free port. Raises OSError."""
        self._server = await asyncio.start_server(
            self._serve, host, 0, limit=BUFFER_BYTES, family=socket.AF_UNSPEC
        )
        port = self._server.sockets[0].getsockname()[1]
        return ChannelAddress(host, port, self._secret)

    def say_goodbye(self) -> None:
        """Takes no new requests; those in progress go on."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for channel in self._connections:
            channel.send(encode_frame(FrameKind.GOODBYE, 0))

    async def close(self) -> None:
        """Cancels what is in progress, and closes the connections."""
        self.say_goodbye()
        for task in self._connections.values():
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=_CLOSE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = _ServedChannel(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[channel] = task
        try:
            notice_lost_machine(writer.get_extra_info("socket"))
            accepting = accept_client(reader, writer, self._secret)
            if not await asyncio.wait_for(accepting, _HANDSHAKE_SECONDS):
                _log.warning("a client of the port for replicas does not know its secret")
                return
            await channel.serve()
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            pass  # the client has gone
        except FrameError as error:
            _log.error("a connection to another replica ends: %s", error)
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            del self._connections[channel]
            channel.cancel_all()
            writer.close()

    def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Starts a request."""
        return self._infer(request, headers)


class _ServedChannel:
    """One connection of another replica."""

    def __init__(
        self, server: ChannelServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self.calls: dict[int, asyncio.Task[None]] = {}
        self._windows: dict[int, _Window] = {}
        self._taken = 0
        self._told = False  # whether TAKEN is about to be sent
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all was sent

    async def serve(self) -> None:
        """Until the client goes. Raises as `read_frame`, and FrameError."""
        while True:
            kind, number, contents = await read_frame(self._reader)
            if kind == FrameKind.REQUEST:
                if self._server.stopping:
                    self.send(encode_frame(FrameKind.NOT_TAKEN, number))
                    continue
                head, buffers = decode_request(contents)
                self._take(number)
                window = self._windows[number] = _Window()
                self._start(number, self._run(number, head, buffers, window))
            elif kind == FrameKind.CALL:
                self._take(number)
                self._start(number, self._call(number, contents))
            elif kind == FrameKind.CANCEL:
                if number in self.calls:
                    self.calls[number].cancel()
            elif kind == FrameKind.ACKNOWLEDGE:
                if number in self._windows:
                    self._windows[number].acknowledge()
            else:
                raise FrameError(f"unexpected frame of kind {kind}")

    def _take(self, number: int) -> None:
        """Tells the client before the request starts, once for all that came together."""
        self._taken = number
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._told = False
        self.send(encode_frame(FrameKind.TAKEN, self._taken))

    async def _taken_sent(self) -> None:
        """Returns once the client is told, also if this process dies then.

        Raises ConnectionError, and HostError if the client does not read.
        """
        if self._writer.transport.get_write_buffer_size() == 0:
            return
        try:
            await asyncio.wait_for(self._writer.drain(), _SEND_SECONDS)
        except asyncio.TimeoutError:
            raise unavailable(
                f"the replica that asks has read nothing for {_SEND_SECONDS:g} s"
            ) from None

    def send(self, frame: bytes) -> None:
        """Sends a frame, if the client is there."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    @property
    def requests(self) -> int:
        """The requests in progress."""
        return len(self._windows)

    def cancel_all(self) -> None:
        """Cancels the calls of a client that has gone."""
        for task in self.calls.values():
            task.cancel()

    def _start(self, number: int, run: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(run)
        self.calls[number] = task
        task.add_done_callback(lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        del self.calls[number]
        self._windows.pop(number, None)

    async def _run(
        self, number: int, head: RequestHead, buffers: list[memoryview], window: _Window
    ) -> None:
        """Answers a request."""
        try:
            await self._taken_sent()
            request = unpack_request(head, buffers)
            async with aclosing(self._server.infer(request, head.headers)) as responses:
                async for response, final in responses:
                    packed, _, *outputs = pack_response(response, final)
                    kind = FrameKind.LAST_RESPONSE if final else FrameKind.RESPONSE
                    self.send(encode_message(kind, number, packed, outputs))
                    if final:
                        return
                    await self._writer.drain()
                    await window.response_sent()
        except HostError as error:
            self.send(encode_refusal(number, Refusal.from_error(error)))
        except ConnectionError:
            pass  # the client has gone
        except Exception:  # the top of a call: a defect is logged and answered
            _log.exception("unexpected failure of a request of another replica")
            refusal = Refusal("Internal", "unexpected failure of the replica; see its log")
            self.send(encode_refusal(number, refusal))

    async def _call(self, number: int, contents: bytes) -> None:
        """Answers the call of a method."""
        name = ""
        try:
            await self._taken_sent()
            name, arguments = decode_pickled(contents)
            result = True, await self._server.methods[name](*arguments)
            frame = encode_pickled(FrameKind.RESULT, number, result)
        except ConnectionError:
            return  # the client has gone
        except Exception as error:  # the top of a call: the caller says what is wrong
            _log.exception("a call of '%s' by another replica failed", name)
            failed = False, f"{type(error).__name__}: {error}"
            frame = encode_pickled(FrameKind.RESULT, number, failed)
        self.send(frame)


class _Window:
    """Lets the responses to one request wait for a client that reads slowly."""

    def __init__(self) -> None:
        self._left = RESPONSE_WINDOW
        self._room = asyncio.Event()

    def acknowledge(self) -> None:
        """The client has read responses."""
        self._left += RESPONSES_PER_ACKNOWLEDGEMENT
        self._room.set()

    async def response_sent(self) -> None:
        """Returns once another response may be sent."""
        self._left -= 1
        while self._left <= 0:
            self._room.clear()
            await self._room.wait()

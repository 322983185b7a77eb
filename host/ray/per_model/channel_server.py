"""A replica's port for requests of other replicas, which reach it without Ray in between."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from host.errors import HostError
from host.inference.request import InferRequest
from host.ray.per_model.frames import (
    RESPONSE_WINDOW,
    RESPONSES_PER_ACKNOWLEDGEMENT,
    TOKEN_BYTES,
    FrameError,
    FrameKind,
    decode_request,
    encode_frame,
    encode_message,
    encode_refusal,
    read_frame,
)
from host.ray.per_model.messages import Refusal, RequestHead, pack_response, unpack_request
from host.remote.provider import ResponseStream

_log = logging.getLogger("pbhost")

_TOKEN_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
BUFFER_BYTES = 1 << 20
"""Bytes that a connection reads ahead."""

Infer = Callable[[InferRequest, Mapping[str, str]], ResponseStream]


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a replica takes requests, and the secret that a client has to know."""

    host: str
    port: int
    token: bytes


class ChannelServer:
    """Answers requests of other replicas. Belongs to one event loop.

    `infer`: as that of `host.server.own_models.OwnModels`.
    """

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._connections: dict[_ServedChannel, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self.stopping = False

    @property
    def ongoing(self) -> int:
        """Requests in progress. Ray Serve does not count them."""
        return sum(len(channel.calls) for channel in self._connections)

    async def start(self, host: str) -> ChannelAddress:
        """Listens on a free port. Raises OSError."""
        self._server = await asyncio.start_server(
            self._serve, host, 0, limit=BUFFER_BYTES, family=socket.AF_UNSPEC
        )
        port = self._server.sockets[0].getsockname()[1]
        return ChannelAddress(host, port, self._token)

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
            token = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), _TOKEN_SECONDS)
            if not hmac.compare_digest(token, self._token):
                _log.warning("a client of the port for replicas has sent a wrong secret")
                return
            await channel.serve()
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
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
        self.calls: dict[int, _ServedCall] = {}
        self._taken = 0
        self._told = False  # whether TAKEN is about to be sent

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
                self.calls[number] = _ServedCall(self, number, head, buffers)
            elif kind == FrameKind.CANCEL:
                if number in self.calls:
                    self.calls[number].task.cancel()
            elif kind == FrameKind.ACKNOWLEDGE:
                if number in self.calls:
                    self.calls[number].acknowledge()
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

    def send(self, frame: bytes) -> None:
        """Sends a frame, if the client is there."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def drain(self) -> None:
        """Returns once the client reads."""
        await self._writer.drain()

    def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Starts a request."""
        return self._server.infer(request, headers)

    def cancel_all(self) -> None:
        """Cancels the calls of a client that has gone."""
        for call in self.calls.values():
            call.task.cancel()


class _ServedCall:
    """One request."""

    def __init__(
        self, channel: _ServedChannel, number: int, head: RequestHead, buffers: list[memoryview]
    ) -> None:
        self._channel = channel
        self._number = number
        self._window = RESPONSE_WINDOW
        self._room = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(head, buffers))
        self.task.add_done_callback(lambda _: channel.calls.pop(number, None))

    def acknowledge(self) -> None:
        """The client has read responses."""
        self._window += RESPONSES_PER_ACKNOWLEDGEMENT
        self._room.set()

    async def _run(self, head: RequestHead, buffers: list[memoryview]) -> None:
        channel, number = self._channel, self._number
        try:
            request = unpack_request(head, buffers)
            async with aclosing(channel.infer(request, head.headers)) as responses:
                async for response, final in responses:
                    packed, _, *outputs = pack_response(response, final)
                    kind = FrameKind.LAST_RESPONSE if final else FrameKind.RESPONSE
                    channel.send(encode_message(kind, number, packed, outputs))
                    if final:
                        return
                    self._window -= 1
                    await channel.drain()
                    while self._window <= 0:
                        self._room.clear()
                        await self._room.wait()
        except HostError as error:
            channel.send(encode_refusal(number, Refusal.from_error(error)))
        except ConnectionError:
            pass  # the client has gone
        except Exception:  # the top of a call: a defect is logged and answered
            _log.exception("unexpected failure of a request of another replica")
            refusal = Refusal("Internal", "unexpected failure of the replica; see its log")
            channel.send(encode_refusal(number, refusal))

"""A replica's port for requests of other replicas, which reach it without Ray in between.

A connection begins with a handshake. The server has given the secret to its clients through Ray; it
is never sent here. The client sends a nonce. The server answers with its own nonce and a proof, and
then the client sends its proof. A proof is the HMAC (RFC 2104) with SHA-256 of both nonces and the
side. Until then, neither end reads anything else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from host.errors import HostError, internal, unavailable
from host.frontends.grpc.methods import ResponseCallback
from host.frontends.inference_core import Cancellable
from host.frontends.request_headers import Header
from host.inference.request import InferRequest
from host.ray.channel_messages import (
    RESPONSE_WINDOW,
    Frame,
    FrameError,
    FrameKind,
    FrameReader,
    Refusal,
    ReplicaMethod,
    decode_acknowledgement,
    decode_call,
    decode_request,
    decode_rpc,
    encode_contents,
    encode_frame,
    encode_message,
    encode_refusal,
    encode_result,
    pack_response,
    unpack_request,
)
from host.remote_models import ResponseStream, ResponseWindow

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES


def answer_client(secret: bytes, nonce: bytes) -> bytes:
    """The answer of a server to the nonce of a client."""
    own = secrets.token_bytes(NONCE_BYTES)
    return own + _prove(secret, b"server", nonce, own)


def answer_server(secret: bytes, nonce: bytes, answer: bytes) -> bytes:
    """The proof of a client. Raises PermissionError if the server does not know the secret."""
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _prove(secret, b"server", nonce, theirs)):
        raise PermissionError("the server does not know the secret of the replica")
    return _prove(secret, b"client", nonce, theirs)


async def greet_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """The client's end. Raises OSError, also if the server does not know the secret or leaves."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce)
    try:
        answer = await reader.readexactly(ANSWER_BYTES)
    except asyncio.IncompleteReadError:
        raise ConnectionAbortedError("the server has ended the handshake") from None
    writer.write(answer_server(secret, nonce, answer))


async def accept_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> bool:
    """The server's end; whether the client knows the secret.

    Raises IncompleteReadError and OSError if it leaves.
    """
    nonce = await reader.readexactly(NONCE_BYTES)
    answer = answer_client(secret, nonce)
    writer.write(answer)
    proof = await reader.readexactly(PROOF_BYTES)
    expected = _prove(secret, b"client", nonce, answer[:NONCE_BYTES])
    return hmac.compare_digest(proof, expected)


def _prove(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(nonces), "sha256")


_LOST_SECONDS = 10  # without a sign of life from the other machine


def notice_lost_machine(connection: socket.socket) -> None:
    """Ends the connection if the other machine is gone, which sends no end itself.

    Raises OSError if the connection has ended.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _LOST_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_SECONDS * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_log = logging.getLogger("pbhost")

_HANDSHAKE_SECONDS = 5.0
_MAX_HANDSHAKES = 512
"""Connections whose clients have not proved yet that they know the secret."""
_CLOSE_SECONDS = 5.0
_SEND_SECONDS = 10.0
BUFFER_BYTES = 1 << 20
"""Bytes that a connection reads ahead."""

Infer = Callable[[InferRequest, Mapping[str, str]], ResponseStream]
Methods = Mapping[ReplicaMethod[Any], Callable[..., Awaitable[Any]]]


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

    `infer`: as that of `host.server.own_models.OwnModels`. `start_infer`: as that of
    `host.frontends.grpc.grpc_application.GrpcApplication`. `methods`: what others may call.
    """

    def __init__(
        self,
        infer: Infer,
        start_infer: Callable[[bytes, Sequence[Header], ResponseCallback], Cancellable],
        methods: Methods,
    ) -> None:
        self.infer = infer
        self.start_infer = start_infer
        self._methods = {method.name: (method, function) for method, function in methods.items()}
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._connections: dict[_ServedChannel, asyncio.Task[None]] = {}
        self._handshakes = 0
        self._refuses_handshakes = False
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
        """Takes no new requests; those in progress continue."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for channel in self._connections:
            channel.say_goodbye()

    async def close(self) -> None:
        """Cancels what is in progress, and closes the connections."""
        self.say_goodbye()
        for task in self._connections.values():
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=_CLOSE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._may_greet():
            writer.close()
            return
        channel = _ServedChannel(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[channel] = task
        try:
            notice_lost_machine(writer.get_extra_info("socket"))
            if not await self._greet(reader, writer):
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

    def _may_greet(self) -> bool:
        """Whether another handshake may begin; logs that there are too many, once for a flood."""
        full = self._handshakes >= _MAX_HANDSHAKES
        if self._handshakes < _MAX_HANDSHAKES // 2:
            self._refuses_handshakes = False
        if full and not self._refuses_handshakes:
            _log.warning(
                "the port for replicas closes new connections: %d clients have not proved yet that"
                " they know its secret; let only nodes of the cluster reach the ports of replicas",
                self._handshakes,
            )
            self._refuses_handshakes = True
        return not full

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the client knows the secret. Raises as `accept_client`, and TimeoutError."""
        self._handshakes += 1
        try:
            accepting = accept_client(reader, writer, self._secret)
            return await asyncio.wait_for(accepting, _HANDSHAKE_SECONDS)
        finally:
            self._handshakes -= 1

    async def call_own(self, name: str, arguments: Sequence[object]) -> Any:
        """The result of a method. Raises HostError, also for a defect of the method."""
        try:
            _, function = self._methods[name]
            return await function(*arguments)
        except HostError:
            raise
        except Exception as error:  # the top of a call: a defect is logged and answered
            raise _log_defect(name, error) from error

    async def answer_ray(self, name: str, arguments: Sequence[object]) -> Any:
        """The result of a method, or a Refusal: Ray would wrap a HostError."""
        try:
            return await self.call_own(name, arguments)
        except HostError as error:
            return Refusal.from_error(error)

    async def answer_call(self, number: int, contents: bytes) -> bytes:
        """The frame with the result of a call, or its error."""
        name = ""
        try:
            name, encoded = decode_call(contents)
            method, _ = self._methods[name]
            result = await self.call_own(name, method.decode_arguments(encoded))
            return encode_result(number, result)
        except HostError as error:
            return encode_refusal(number, Refusal.from_error(error))
        except Exception as error:  # as above: what cannot be decoded or encoded
            return encode_refusal(number, Refusal.from_error(_log_defect(name, error)))


def _log_defect(method: str, error: Exception) -> HostError:
    """The error for the caller of a method."""
    _log.error("a call of '%s' by another replica failed", method, exc_info=error)
    return unavailable(f"a replica failed to answer '{method}': {type(error).__name__}: {error}")


class _ServedChannel:
    """One connection of another replica."""

    def __init__(
        self, server: ChannelServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._waiting: list[Frame] = []  # have arrived, and have not begun
        self._beginning: asyncio.Task[None] | None = None
        self._work: dict[int, Cancellable] = {}
        self._windows: dict[int, ResponseWindow] = {}  # of requests
        self._rpcs: set[int] = set()
        self._greeted = False  # the handshake is over
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all was sent

    async def serve(self) -> None:
        """Until the client goes. Raises OSError and FrameError."""
        self._greeted = True
        if self._server.stopping:
            self.say_goodbye()
        frames = FrameReader()
        while data := await self._reader.read(BUFFER_BYTES):
            for frame in frames.feed(data):
                self._frame_received(*frame)
            self._tell_what_is_taken()

    def _frame_received(self, kind: int, number: int, contents: bytes) -> None:
        if kind in (FrameKind.REQUEST, FrameKind.RPC, FrameKind.CALL):
            if self._server.stopping and kind != FrameKind.CALL:
                self.send(encode_frame(FrameKind.NOT_TAKEN, number))
                return
            self._waiting.append((kind, number, contents))
        elif kind == FrameKind.CANCEL:
            self._cancel(number)
        elif kind == FrameKind.ACKNOWLEDGE:
            if number in self._windows:
                self._windows[number].acknowledge(decode_acknowledgement(contents))
        else:
            raise FrameError(f"unexpected frame of kind {kind}")

    def _tell_what_is_taken(self) -> None:
        """Tells the client before the work starts, once for all that came together."""
        if not self._waiting:
            return
        _, last, _ = self._waiting[-1]
        self.send(encode_frame(FrameKind.TAKEN, last))
        # An event loop may send at the end of its turn.
        asyncio.get_running_loop().call_soon(self._begin_if_sent)

    def _begin_if_sent(self) -> None:
        if self._beginning is not None or not self._waiting:
            return  # as soon as the client reads; or never, as it has gone
        if self._writer.transport.get_write_buffer_size() == 0:
            self._begin()
            return
        self._beginning = asyncio.get_running_loop().create_task(self._begin_when_sent())

    async def _begin_when_sent(self) -> None:
        """Begins once the client is notified, also if this process dies then."""
        try:
            while self._writer.transport.get_write_buffer_size():
                await asyncio.wait_for(self._writer.drain(), _SEND_SECONDS)
        except asyncio.TimeoutError:
            error = unavailable(f"the replica that asks has read nothing for {_SEND_SECONDS:g} s")
            waiting, self._waiting = self._waiting, []
            for _, number, _ in waiting:
                self.send(encode_refusal(number, Refusal.from_error(error)))
        except OSError:
            return  # the client has gone
        finally:
            self._beginning = None
        self._begin()

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        for kind, number, contents in waiting:
            if kind == FrameKind.RPC:
                self._begin_rpc(number, contents)
            elif kind == FrameKind.CALL:
                self._start(number, self._call(number, contents))
            else:
                window = self._windows[number] = ResponseWindow(RESPONSE_WINDOW)
                self._start(number, self._run(number, contents, window))

    def say_goodbye(self) -> None:
        """Tells the client to send no new requests; after the handshake, if that continues."""
        if self._greeted:
            self.send(encode_frame(FrameKind.GOODBYE, 0))

    def send(self, frame: bytes) -> None:
        """Sends a frame, if the client is there."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    @property
    def requests(self) -> int:
        """The requests in progress."""
        waiting = sum(kind != FrameKind.CALL for kind, _, _ in self._waiting)
        return waiting + len(self._windows) + len(self._rpcs)

    def cancel_all(self) -> None:
        """Cancels the work for a client that has gone."""
        self._waiting.clear()
        if self._beginning is not None:
            self._beginning.cancel()
        for number in list(self._work):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if self._waiting:
            self._waiting = [frame for frame in self._waiting if frame[1] != number]
        work = self._work.get(number)
        if work is not None:
            if number in self._rpcs:
                self._rpc_ended(number)
            work.cancel()

    def _begin_rpc(self, number: int, contents: bytes) -> None:
        """Answers a ModelInfer of a client."""

        def done(answer: bytes | HostError) -> None:
            if number not in self._rpcs:
                return  # it was cancelled
            self._rpc_ended(number)
            if isinstance(answer, HostError):
                self.send(encode_refusal(number, Refusal.from_error(answer)))
            else:
                self.send(encode_contents(FrameKind.RPC_RESPONSE, number, answer))

        self._rpcs.add(number)
        try:
            message, metadata = decode_rpc(contents)
            work = self._server.start_infer(message, metadata, done)
        except FrameError as error:
            done(internal(str(error)))
            return
        except HostError as error:
            done(error)
            return
        if number in self._rpcs:
            self._work[number] = work

    def _rpc_ended(self, number: int) -> None:
        self._rpcs.discard(number)
        self._work.pop(number, None)

    def _start(self, number: int, run: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(run)
        self._work[number] = task
        task.add_done_callback(lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        del self._work[number]
        self._windows.pop(number, None)

    async def _run(self, number: int, contents: bytes, window: ResponseWindow) -> None:
        """Answers a request."""
        try:
            head, buffers = decode_request(contents)
            request = unpack_request(head, buffers)
            async with aclosing(self._server.infer(request, head.headers)) as responses:
                async for response, final in responses:
                    packed, _, *outputs = pack_response(response, final)
                    kind = FrameKind.LAST_RESPONSE if final else FrameKind.RESPONSE
                    self.send(encode_message(kind, number, packed, outputs))
                    if final:
                        return
                    window.sent(sum(map(len, outputs)))
                    await self._writer.drain()
                    await window.wait()
        except HostError as error:
            self.send(encode_refusal(number, Refusal.from_error(error)))
        except OSError:
            pass  # the client has gone
        except Exception:  # the top of a call: a defect is logged and answered
            _log.exception("unexpected failure of a request of another replica")
            refusal = Refusal("Internal", "unexpected failure of the replica; see its log")
            self.send(encode_refusal(number, refusal))

    async def _call(self, number: int, contents: bytes) -> None:
        """Answers the call of a method."""
        self.send(await self._server.answer_call(number, contents))

"""One `ModelStreamInfer` stream: which answer goes out when, and what ends it (spec 2.5)."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from host.errors import HostError, internal
from host.frontends.classification import classify
from host.frontends.grpc_codec import InferMessage, parse_infer_request
from host.frontends.grpc_encode import encode_stream_notice, encode_stream_response
from host.frontends.grpc_methods import Context, Send
from host.inference import Call, InferResponse

OPEN_REQUESTS = 1024
"""Requests of one stream whose answers may be outstanding before the next one is read."""

Answer = InferResponse | HostError | None
"""A response; an early error; or nothing, for a request that ends without a last response."""


class StreamDoor(Protocol):
    """What a stream asks of the service that it belongs to."""

    def admit(self, message: InferMessage, context: Context) -> Call:
        """Hand the request to the core. Raises HostError: an early error."""

    def decoupled(self, message: InferMessage) -> bool:
        """Whether answers of its model may overtake those of others; False if it is unknown."""


class _Exchange:
    """One request of the stream, with answers that wait for the answers of earlier requests."""

    __slots__ = ("message", "ordered", "call", "waiting")

    def __init__(self, message: InferMessage, ordered: bool) -> None:
        self.message = message
        self.ordered = ordered
        self.call: Call | None = None
        self.waiting: list[tuple[Answer, bool]] = []


class InferStream:
    """Reads requests and sends answers until the client is done, has gone, or an error ends it.

    Ordinary models answer in the order of the requests, decoupled ones as soon as they can.
    With `errors_end_it`, the first error response ends the stream instead of being sent.
    The metadata of `context` came with the stream and goes with each of its requests.
    """

    def __init__(
        self,
        door: StreamDoor,
        send: Send,
        context: Context,
        errors_end_it: bool = False,
    ) -> None:
        self._door = door
        self._send = send
        self._errors_end_it = errors_end_it
        self._context = context
        self._open: set[_Exchange] = set()
        self._line: deque[_Exchange] = deque()  # ordered exchanges; the first one may answer
        self._outbox: deque[tuple[_Exchange, Answer, bool]] = deque()
        self._room = asyncio.Semaphore(OPEN_REQUESTS)
        self._wake = asyncio.Event()
        self._end: HostError | None = None

    def end(self, error: HostError) -> None:
        """End the stream with `error` once every request read so far is answered."""
        self._end = error
        self._wake.set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Serve the stream. Raises the HostError that ends it, if one does.

        Requests that are still open then, or when the caller is cancelled, are cancelled.
        """
        reader = asyncio.ensure_future(self._read(requests))
        reader.add_done_callback(self._reader_done)
        try:
            while True:
                while self._outbox:
                    await self._write(*self._outbox.popleft())
                if reader.done():
                    reader.result()  # raises what broke it
                    if not self._open:
                        return
                elif self._end is not None and not self._open:
                    raise self._end
                self._wake.clear()
                await self._wake.wait()
        finally:
            reader.cancel()
            for exchange in list(self._open):
                if exchange.call is not None:
                    exchange.call.cancel()
                    if exchange.call.request.trace is not None:
                        exchange.call.request.trace.close()
            # What nobody gets any more lies in shared memory: it is not to wait for a collection.
            self._outbox.clear()
            for exchange in self._open:
                exchange.waiting.clear()

    def _reader_done(self, reader: asyncio.Future[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # seen, even if the stream ends for another reason
        self._wake.set()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            await self._room.acquire()
            self._accept(data)

    def _accept(self, data: bytes) -> None:
        message, error = InferMessage(), None
        try:
            message = parse_infer_request(data)
            call = self._door.admit(message, self._context)
        except HostError as early:
            error = early
        exchange = _Exchange(message, ordered=not self._door.decoupled(message))
        self._open.add(exchange)
        if exchange.ordered:
            self._line.append(exchange)
        if error is not None:
            self._answer(exchange, error, True)
            return
        exchange.call = call
        call.subscribe(functools.partial(self._answer, exchange))

    def _answer(self, exchange: _Exchange, answer: Answer, final: bool) -> None:
        """Pass an answer on to the outbox, or let it wait for its turn."""
        if exchange.ordered and self._line[0] is not exchange:
            exchange.waiting.append((answer, final))
            return
        self._outbox.append((exchange, answer, final))
        self._wake.set()
        if exchange.ordered and final:
            self._next_in_line()

    def _next_in_line(self) -> None:
        self._line.popleft()
        while self._line:
            exchange = self._line[0]
            answers, exchange.waiting = exchange.waiting, []
            self._outbox.extend((exchange, *waiting) for waiting in answers)
            if not answers or not answers[-1][1]:
                return
            self._line.popleft()

    async def _write(self, exchange: _Exchange, answer: Answer, final: bool) -> None:
        data = self._encode(exchange, answer, final)
        trace = None if exchange.call is None else exchange.call.request.trace
        if trace is not None:
            trace.stamp("GRPC_SEND_START")
        if data:
            await self._send(data)
            if isinstance(answer, InferResponse) and exchange.call is not None:
                exchange.call.took(answer)
        if trace is not None:
            trace.stamp("GRPC_SEND_END")
            if final:
                trace.close()
        if final:
            self._open.discard(exchange)
            self._room.release()

    def _encode(self, exchange: _Exchange, answer: Answer, final: bool) -> bytes:
        """The message to send; empty for none. Raises the HostError that ends the stream."""
        message = exchange.message
        if isinstance(answer, HostError):  # early: it carries the id only
            return encode_stream_notice(answer.message, message.id)
        error: HostError | None = None
        if answer is None:
            if exchange.ordered:
                error = internal("expected a single response, got 0")
            elif not message.wants_empty_final:
                return b""
        elif answer.error is not None:
            error = answer.error
        else:
            try:
                classes = exchange.call.request.classes if exchange.call is not None else None
                return encode_stream_response(
                    classify(answer, classes) if classes else answer, final
                )
            except HostError as unsendable:
                error = unsendable
        text = ""
        if error is not None:
            if self._errors_end_it:
                raise error
            text = error.message or error.code.value  # a client takes an empty text for success
        return encode_stream_notice(
            text, message.id, message.model_name, message.model_version, final
        )

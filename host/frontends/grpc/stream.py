"""One `ModelStreamInfer` stream: which answer goes out when, and what ends it (spec 2.5)."""

from __future__ import annotations

import functools
from collections import deque
from typing import Protocol

from host.errors import HostError, internal
from host.frontends.classification import classify
from host.frontends.grpc.codec import InferMessage
from host.frontends.grpc.encode import encode_stream_notice, encode_stream_response
from host.frontends.grpc.methods import Client, Context
from host.inference.request import Call, InferResponse

OPEN_REQUESTS = 1024
"""Requests of one stream whose answers may be outstanding before the next one is read."""

Answer = InferResponse | HostError | None
"""A response; an early error; or nothing, for a request that ends without a last response."""


class StreamDoor(Protocol):
    """What a stream asks of the service that it belongs to."""

    def admit(self, data: bytes, context: Context) -> tuple[InferMessage, str, Call | HostError]:
        """Hand a request to the core: what was understood of it, except for its tensors; its id;
        and its call, or an early error."""

    def decoupled(self, message: InferMessage) -> bool:
        """Whether answers of its model may overtake those of others; False if it is unknown."""

    def left(self, stream: InferStream) -> None:
        """The stream is over."""


class _Exchange:
    """One request of the stream, with answers that wait for the answers of earlier requests."""

    __slots__ = ("message", "id", "ordered", "call", "waiting")

    def __init__(self, message: InferMessage, request_id: str, ordered: bool) -> None:
        self.message = message
        self.id = request_id
        self.ordered = ordered
        self.call: Call | None = None
        self.waiting: list[tuple[Answer, bool]] = []


class InferStream:
    """Takes requests and writes answers until the client is done, has gone, or an error ends it.

    All happens in the call that brings a request or an answer: no task is woken. Ordinary models
    answer in the order of the requests, decoupled ones as soon as they can. With `errors_end_it`,
    the first error response ends the stream instead of being sent. The metadata of `context` came
    with the stream and goes with each of its requests.
    """

    def __init__(
        self,
        door: StreamDoor,
        client: Client,
        context: Context,
        errors_end_it: bool = False,
    ) -> None:
        self._door = door
        self._client = client
        self._errors_end_it = errors_end_it
        self._context = context
        self._open: set[_Exchange] = set()
        self._full = False  # as many requests are open as may be
        self._line: deque[_Exchange] = deque()  # ordered exchanges; the first one may answer
        self._outbox: deque[tuple[_Exchange, Answer, bool]] = deque()
        self._busy = False  # an answer is being written, or waits for room
        self._leaving: tuple[_Exchange, Answer, bool] | None = None  # what waits for room
        self._half_closed = False
        self._end: HostError | None = None
        self._over = False

    def end(self, error: HostError) -> None:
        """End the stream with `error` once every request read so far is answered."""
        self._end = error
        self._close_if_done()

    def received(self, message: bytes) -> bool:
        """Take a request; whether there may be another one before `read_on` asks for it."""
        understood, request_id, outcome = self._door.admit(message, self._context)
        exchange = _Exchange(understood, request_id, not self._door.decoupled(understood))
        self._open.add(exchange)
        if exchange.ordered:
            self._line.append(exchange)
        if isinstance(outcome, HostError):
            self._answer(exchange, outcome, True)
        else:
            exchange.call = outcome
            outcome.subscribe(functools.partial(self._answer, exchange))
        self._full = len(self._open) >= OPEN_REQUESTS
        return not self._full

    def half_closed(self) -> None:
        """No more requests: the stream ends when those that are open are answered."""
        self._half_closed = True
        self._close_if_done()

    def write_on(self) -> None:
        """The last answer has left."""
        if self._leaving is not None:
            left, self._leaving = self._leaving, None
            self._written(*left)
            self._write()

    def cancel(self) -> None:
        """Cancel the requests that are open; nothing is written any more."""
        if self._over:
            return
        self._over = True
        for exchange in list(self._open):
            if exchange.call is not None:
                exchange.call.cancel()
                if exchange.call.request.trace is not None:
                    exchange.call.request.trace.close()
        # What nobody gets any more lies in shared memory: it is not to wait for a collection.
        self._leaving = None
        self._outbox.clear()
        for exchange in self._open:
            exchange.waiting.clear()
        self._open.clear()
        self._door.left(self)

    def _close(self, error: Exception | None) -> None:
        if not self._over:
            self.cancel()
            self._client.end(error)

    def _close_if_done(self) -> None:
        if self._open or self._busy:
            return
        if self._half_closed:
            self._close(None)
        elif self._end is not None:
            self._close(self._end)

    def _answer(self, exchange: _Exchange, answer: Answer, final: bool) -> None:
        """Write an answer, or let it wait for its turn."""
        if self._over:
            return
        if exchange.ordered and self._line[0] is not exchange:
            exchange.waiting.append((answer, final))
            return
        self._outbox.append((exchange, answer, final))
        if exchange.ordered and final:
            self._next_in_line()
        if not self._busy:  # otherwise whoever has caused this answer goes on with it
            self._write()

    def _next_in_line(self) -> None:
        self._line.popleft()
        while self._line:
            exchange = self._line[0]
            answers, exchange.waiting = exchange.waiting, []
            self._outbox.extend((exchange, *waiting) for waiting in answers)
            if not answers or not answers[-1][1]:
                return
            self._line.popleft()

    def _write(self) -> None:
        """Write what may leave until the client has enough."""
        self._busy = True
        try:
            while self._outbox:
                exchange, answer, final = self._outbox.popleft()
                data = self._encode(exchange, answer, final)
                if exchange.call is not None and exchange.call.request.trace is not None:
                    exchange.call.request.trace.stamp("GRPC_SEND_START")
                more = not final or len(self._open) > 1
                if data and not self._client.write(data, more):
                    self._leaving = exchange, answer, final
                    return
                self._written(exchange, answer, final)
        except Exception as error:  # the engine logs a defect: the model is not to hear of it
            self._close(error)
        self._busy = False
        self._close_if_done()

    def _written(self, exchange: _Exchange, answer: Answer, final: bool) -> None:
        call = exchange.call
        if call is not None:
            if isinstance(answer, InferResponse):
                call.took(answer)
            if call.request.trace is not None:
                call.request.trace.stamp("GRPC_SEND_END")
                if final:
                    call.request.trace.close()
        if final:
            self._open.discard(exchange)
            if self._full:
                self._full = False
                self._client.read_on()

    def _encode(self, exchange: _Exchange, answer: Answer, final: bool) -> bytes:
        """The message to send; empty for none. Raises the HostError that ends the stream."""
        message = exchange.message
        if isinstance(answer, HostError):  # early: it carries the id only
            return encode_stream_notice(answer.message, exchange.id)
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
            text, exchange.id, message.model_name, message.model_version, final
        )

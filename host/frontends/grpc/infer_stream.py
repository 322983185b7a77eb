"""One `ModelStreamInfer` stream: the order of its responses, and its end.

Source: docs/reference/grpc.md, "ModelStreamInfer".
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Protocol

from host.errors import HostError, internal
from host.frontends.classification import classify
from host.frontends.error_status import retry_milliseconds
from host.frontends.grpc.infer_request import InferMessage
from host.frontends.grpc.infer_response import encode_empty_stream_response, encode_infer_response
from host.frontends.grpc.methods import RpcContext, StreamWriter
from host.frontends.receive_memory import ReservedBytes
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse

MAX_OPEN_REQUESTS = 1024
"""Maximum number of open requests of one stream before it stops reading."""

StreamOutcome = InferResponse | HostError | None
"""A response, an early error, or None for a request that ends without a last response."""


class StreamService(Protocol):
    """The service that a stream belongs to."""

    def submit_stream_request(
        self, data: bytes, context: RpcContext, reserved: ReservedBytes | None
    ) -> tuple[InferMessage, str, Call | HostError | InferRequest | None]:
        """Submits a request: returns the message without tensors, its id, and its call or its
        error. None: `submit_large_request` submits it. A request: `submit_when_loaded` submits it.
        `reserved` is the memory of `data`, if it is counted.
        """

    async def submit_large_request(
        self, message: InferMessage, context: RpcContext, reserved: ReservedBytes | None
    ) -> Call | HostError:
        """Decodes the large inputs of a message, and submits the request."""

    async def submit_when_loaded(
        self, request: InferRequest, context: RpcContext
    ) -> Call | HostError:
        """Submits a request, after its model is loaded if it loads on demand."""

    def is_decoupled(self, message: InferMessage) -> bool:
        """Whether responses of its model may overtake others; False if it is unknown."""

    def stream_closed(self, stream: InferStream) -> None:
        """Called when the stream has ended."""


class _PendingRequest:
    """A request of the stream, with responses that wait for those of earlier requests."""

    __slots__ = ("message", "id", "ordered", "call", "queued")

    def __init__(self, message: InferMessage, request_id: str) -> None:
        self.message = message
        self.id = request_id
        self.ordered = False  # until it is submitted
        self.call: Call | None = None
        self.queued: list[tuple[StreamOutcome, bool]] = []


class InferStream:
    """Takes requests and writes responses until the client is done or gone, or an error ends it.

    Everything happens in the call that brings a request or a response; no task is woken. Responses
    of ordinary models are in the order of the requests; those of decoupled models are sent as soon
    as possible. `close_on_error`: the first error response ends the stream. `context`: its metadata
    applies to each request.
    """

    def __init__(
        self,
        service: StreamService,
        writer: StreamWriter,
        context: RpcContext,
        close_on_error: bool = False,
    ) -> None:
        self._service = service
        self._writer = writer
        self._close_on_error = close_on_error
        self._context = context
        self._open_requests: set[_PendingRequest] = set()
        self._reading_paused = False  # the maximum number of requests is open
        self._ordered_requests: deque[_PendingRequest] = deque()  # the first one may respond
        self._send_queue: deque[tuple[_PendingRequest, StreamOutcome, bool]] = deque()
        self._writing = False  # a response is being written, or waits until it can be
        # The response that waits.
        self._unfinished_write: tuple[_PendingRequest, StreamOutcome, bool] | None = None
        # A request with large contents is decoded, or the model of a request is loaded.
        self._submission: asyncio.Task[None] | None = None
        self._half_closed = False
        self._closing_error: HostError | None = None
        self._retry: int | None = None  # milliseconds, if the last request was above a limit
        self._closed = False

    def finish_after_open_requests(self, error: HostError) -> None:
        """Ends the stream with `error` once every request read so far is answered."""
        self._closing_error = error
        self._close_if_done()

    def message_received(self, message: bytes, reserved: ReservedBytes | None = None) -> bool:
        """Submits a request; returns whether the next one may arrive before `resume_reading`."""
        understood, request_id, outcome = self._service.submit_stream_request(
            message, self._context, reserved
        )
        pending = _PendingRequest(understood, request_id)
        self._open_requests.add(pending)
        if outcome is None:
            submit = functools.partial(
                self._service.submit_large_request, understood, self._context, reserved
            )
        elif isinstance(outcome, InferRequest):
            submit = functools.partial(self._service.submit_when_loaded, outcome, self._context)
        else:
            return self._subscribe(pending, outcome)
        self._submission = asyncio.ensure_future(self._await_submission(pending, submit))
        return False

    def _subscribe(self, pending: _PendingRequest, outcome: Call | HostError) -> bool:
        """Waits for the responses; returns whether the next request may come."""
        pending.ordered = not self._service.is_decoupled(pending.message)
        if pending.ordered:
            self._ordered_requests.append(pending)
        if isinstance(outcome, HostError):
            self._retry = retry_milliseconds(outcome)
            self._queue_outcome(pending, outcome, True)
        else:
            self._retry = None
            pending.call = outcome
            outcome.subscribe(functools.partial(self._queue_outcome, pending))
        self._reading_paused = len(self._open_requests) >= MAX_OPEN_REQUESTS
        return not self._reading_paused

    async def _await_submission(
        self,
        pending: _PendingRequest,
        submit: Callable[[], Coroutine[None, None, Call | HostError]],
    ) -> None:
        """Waits until a request is submitted; nothing is read meanwhile.

        `submit` is called here, as a task that is cancelled before it runs would leave a coroutine
        that nothing awaits.
        """
        try:
            outcome = await submit()
        except Exception as error:  # the engine logs a defect
            self._close_stream(error)
            return
        finally:
            self._submission = None
        if self._subscribe(pending, outcome):
            self._writer.resume_reading()

    def half_closed(self) -> None:
        """Ends the stream when the open requests are answered."""
        self._half_closed = True
        self._close_if_done()

    def resume_writing(self) -> None:
        """The last answer has left."""
        if self._unfinished_write is not None:
            left, self._unfinished_write = self._unfinished_write, None
            self._outcome_written(*left)
            self._write_outcomes()

    def cancel(self) -> None:
        """Cancels the open requests and writes nothing more."""
        if self._closed:
            return
        self._closed = True
        if self._submission is not None:
            self._submission.cancel()
        for pending in list(self._open_requests):
            if pending.call is not None:
                pending.call.cancel()
                if pending.call.request.trace is not None:
                    pending.call.request.trace.finish_response()
        # Releases shared memory at once, without waiting for the garbage collector.
        self._unfinished_write = None
        self._send_queue.clear()
        for pending in self._open_requests:
            pending.queued.clear()
        self._open_requests.clear()
        self._service.stream_closed(self)

    def _close_stream(self, error: Exception | None) -> None:
        if not self._closed:
            self.cancel()
            self._writer.finish_stream(error, self._retry)

    def _close_if_done(self) -> None:
        if self._open_requests or self._writing:
            return
        if self._half_closed:
            self._close_stream(None)
        elif self._closing_error is not None:
            self._close_stream(self._closing_error)

    def _queue_outcome(self, pending: _PendingRequest, answer: StreamOutcome, final: bool) -> None:
        """Writes a response, or queues it until its turn."""
        if self._closed:
            return
        if isinstance(answer, InferResponse) and answer.error is not None:
            # A frontend process gets to know so that its request was refused.
            retry = retry_milliseconds(answer.error)
            self._retry = self._retry if retry is None else retry
        if pending.ordered and self._ordered_requests[0] is not pending:
            pending.queued.append((answer, final))
            return
        self._send_queue.append((pending, answer, final))
        if pending.ordered and final:
            self._queue_next_in_order()
        if not self._writing:  # otherwise the loop that caused this response continues with it
            self._write_outcomes()

    def _queue_next_in_order(self) -> None:
        self._ordered_requests.popleft()
        while self._ordered_requests:
            pending = self._ordered_requests[0]
            answers, pending.queued = pending.queued, []
            self._send_queue.extend((pending, *queued) for queued in answers)
            if not answers or not answers[-1][1]:
                return
            self._ordered_requests.popleft()

    def _write_outcomes(self) -> None:
        """Writes what can be written now."""
        self._writing = True
        try:
            while self._send_queue:
                pending, answer, final = self._send_queue.popleft()
                data = self._encode_outcome(pending, answer, final)
                if data and pending.call is not None and pending.call.request.trace is not None:
                    pending.call.request.trace.record_event("GRPC_SEND_START")
                more = not final or len(self._open_requests) > 1
                if data and not self._writer.write_message(data, more):
                    self._unfinished_write = pending, answer, final
                    return
                self._outcome_written(pending, answer, final, sent=bool(data))
        except Exception as error:  # the engine logs a defect; the model must not see it
            self._close_stream(error)
        self._writing = False
        self._close_if_done()

    def _outcome_written(
        self, pending: _PendingRequest, answer: StreamOutcome, final: bool, *, sent: bool = True
    ) -> None:
        call = pending.call
        if call is not None:
            if isinstance(answer, InferResponse):
                call.acknowledge_response(answer)
            if call.request.trace is not None:
                if sent:  # the end of the responses is a message only if the client asked for it
                    call.request.trace.record_event("GRPC_SEND_END")
                if final:
                    call.request.trace.finish_response()
        if final:
            self._open_requests.discard(pending)
            if self._reading_paused:
                self._reading_paused = False
                self._writer.resume_reading()

    def _encode_outcome(
        self, pending: _PendingRequest, answer: StreamOutcome, final: bool
    ) -> bytes:
        """The message to send; empty for none. Raises the HostError that ends the stream."""
        message = pending.message
        if isinstance(answer, HostError):  # an early error has only the id
            return encode_empty_stream_response(answer.message, pending.id)
        error: HostError | None = None
        if answer is None:
            if pending.ordered:
                error = internal("expected a single response, got 0")
            elif pending.call is None or not pending.call.request.wants_empty_final:
                return b""
        elif answer.error is not None:
            error = answer.error
            if pending.call is not None and pending.call.refused:
                return encode_empty_stream_response(error.message, pending.id)
        else:
            try:
                classes = pending.call.request.classification if pending.call is not None else None
                return encode_infer_response(
                    classify(answer, classes) if classes else answer, final
                )
            except HostError as unsendable:
                error = unsendable
        text = ""
        if error is not None:
            if self._close_on_error:
                raise error
            text = error.message or error.code.value  # clients take an empty text for success
        return encode_empty_stream_response(
            text, pending.id, message.model_name, message.model_version, final
        )

"""The runtime of `pb_utils` in a stub: it sends the calls of the API to the host."""

import itertools
import threading
from collections import deque
from typing import (
    Callable,
    ContextManager,
    Deque,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import pb_utils
from pb_utils._model_texts import BLS_NOT_ALLOWED, limit_text
from pb_utils._request_fields import RequestFields
from pb_utils._runtime import ResponseReceiver, Runtime
from stub.bls_exchange import BlsBursts, BlsReader, BlsWaiter
from stub.conversion import (
    ConversionError,
    arena_full_message,
    error_response,
    request_to_wire,
    response_from_wire,
)
from stub.coroutines import current_batch
from stub.host_calls import HostCalls
from stub.memory import StubMemory
from stub.stub_channel import Channel
from stub.wire.arena import ArenaFull, Block
from stub.wire.log_budget import LogBudget
from stub.wire.messages import (
    BlsRequest,
    BlsResponse,
    CancelBls,
    DropMetrics,
    LogLine,
    ToHost,
    ToStub,
    WireRequest,
    WireResponse,
)

_WARNING = 1
"""A level of log lines, as in docs/reference/model-module.md, "Logger"."""

WireResponseReceiver = Callable[[Optional[WireResponse], bool], None]
"""Receives a response and whether it is final; called on the thread that reads responses."""


class StubRuntime(HostCalls, Runtime):
    """The runtime of `pb_utils` over the channel; any thread may call.

    `handle_other` handles messages that arrive with a BLS response; `wake` wakes the service
    thread, which calls `send_after_deferred`.
    """

    in_server = True

    def __init__(
        self,
        channel: Channel,
        memory: StubMemory,
        bls_reader: BlsReader,
        bls_bursts: BlsBursts,
        handle_other: Callable[[ToStub], None],
        wake: Callable[[], None],
    ) -> None:
        super().__init__(channel.send, self.send_after_deferred)
        self._channel = channel
        self._memory = memory
        self._handle_other = handle_other
        self._wake = wake
        self._bls_numbers = itertools.count(1)
        self._bls_reader = bls_reader
        self._bls_bursts = bls_bursts
        # By number: the receiver, and whether the service thread reads for the request.
        self._bls_receivers: Dict[int, Tuple[WireResponseReceiver, bool]] = {}
        self._deferred: Deque[ToHost] = deque()
        # Reentrant, because a finaliser of the model may make a call inside `send_after_deferred`.
        self._deferred_lock = threading.RLock()
        self.main_thread = threading.main_thread().ident
        """The thread that runs batches."""
        self.batch = 0
        """The batch of the main thread, 0 between batches."""
        self.version_directory = ""
        """The version directory of the model."""
        self.bls_allowed = False
        """Whether the model may send requests to others: from the end of `initialize` on."""
        self._log_budget = LogBudget()

    def allocate_output(self, size: int) -> Tuple[Block, memoryview]:
        """Returns a block for an output, and a writable view of it. Raises ArenaFull."""
        views: List[memoryview] = []
        return self._memory.own.write_with(size, views.append), views[0]

    def end_batch(self) -> None:
        """Ends the batch of the main thread."""
        self.batch = 0
        self.report_dropped_log_lines()

    def receive_bls_response(self, message: BlsResponse) -> None:
        """Passes a BLS response to the receiver of its request."""
        number = message.number
        receive = self._remove_receiver(number) if message.final else self._bls_receivers[number][0]
        if receive is not None:
            receive(message.response, message.final)

    def fail_pending_calls(self, reason: str) -> None:
        """Ends all calls that wait for the host, and later ones, with an error.

        The reason of the first call of this method is the text of the errors.
        """
        super().fail_pending_calls(self._ended or reason)
        for number in list(self._bls_receivers):
            self._fail_bls_request(number)

    def _fail_bls_request(self, number: int) -> None:
        if receive := self._remove_receiver(number):
            receive(error_response(self._ended), True)

    def _remove_receiver(self, number: int) -> Optional[WireResponseReceiver]:
        """Removes the receiver of a request; returns None if its calls have been ended."""
        receive, counted = self._bls_receivers.pop(number, (None, False))
        if counted:
            self._bls_reader.remove_unattended()
        return receive

    def send_after_deferred(self, messages: Sequence[ToHost]) -> None:
        """Sends the messages that finalisers have queued, then `messages`.

        The queued ones have a frame of their own: they are sent even if `messages` cannot be
        encoded. Raises RuntimeError in a forked child.
        """
        self._channel.check_process()  # first, as a forked child may inherit a locked lock
        with self._deferred_lock:  # other threads send nothing between the queue and the channel
            deferred = [self._deferred.popleft() for _ in range(len(self._deferred))]
            if deferred:
                self._channel.send(deferred)
        if messages:
            self._channel.send(messages)

    # The interface of pb_utils

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Sends a log line, if its level is on and the budget admits it."""
        if not self._channel.is_log_level_on(level):
            return
        message = limit_text(message)
        if self._log_budget.admit(len(message)):
            self._channel.send([LogLine(level, filename, line, message, self._batch_of_caller())])
        self.report_dropped_log_lines()

    def report_dropped_log_lines(self, at_once: bool = False) -> None:
        """Logs how many log lines were dropped, once per second or `at_once`."""
        report = self._log_budget.report(at_once)
        if report:
            self._channel.send([LogLine(_WARNING, "log_budget.py", 0, report)])

    def model_dir(self) -> str:
        """`<model directory>/<version>`."""
        return self.version_directory

    def free_memory(self) -> int:
        """Returns the bytes of the arena that tensors kept in this process leave free."""
        return self._memory.free_bytes()

    def exec(self, request: RequestFields) -> pb_utils.InferenceResponse:
        """Sends a request to another model and waits for the response; failures are responses.

        Raises TritonModelException if BLS is not allowed now.
        """
        self.check_bls_allowed()
        wire = self._to_wire(request)
        if isinstance(wire, pb_utils.InferenceResponse):
            return wire
        preferred = request._preferred_memory
        number = next(self._bls_numbers)
        if self.batch and threading.get_ident() == self.main_thread:
            self._send_bls_request(BlsRequest(number, wire, self.batch, True), self._channel.send)
            return response_from_wire(self._wait_for_bls_response(number), self._memory, preferred)
        waiter = BlsWaiter()
        responses: List[WireResponse] = []

        def receive(response: Optional[WireResponse], final: bool) -> None:
            assert response is not None
            responses.append(response)
            self._bls_reader.notify(waiter)

        self._send_numbered_request(number, wire, False, receive, self._channel.send)
        self._bls_reader.wait(waiter)
        return response_from_wire(responses[0], self._memory, preferred)

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Sends a request to another model without waiting; failures are responses.

        Raises TritonModelException if BLS is not allowed now.
        """
        self.check_bls_allowed()
        wire = self._to_wire(request)
        if isinstance(wire, pb_utils.InferenceResponse):
            receive(wire, True)
            return lambda: None
        preferred = request._preferred_memory

        def receive_wire(response: Optional[WireResponse], final: bool) -> None:
            if response is None:
                receive(None, final)
            else:
                receive(response_from_wire(response, self._memory, preferred), final)

        number = self.send_wire_request(wire, decoupled, receive_wire)
        return lambda: self._cancel_bls_request(number)

    def waiting(self) -> ContextManager[None]:
        """Notes that this thread waits for a response within a `with` block."""
        self._channel.flush()
        return self._bls_reader.blocking()

    def send_wire_request(
        self, request: WireRequest, decoupled: bool, receive: WireResponseReceiver
    ) -> int:
        """Sends a request, and returns its number; every response is passed to `receive`."""
        number = next(self._bls_numbers)
        if self._bls_reader.attach_running_loop():
            send, counted = self._bls_bursts.send, False
        else:
            send, counted = self._channel.send, True
            self._bls_reader.add_unattended()
        self._send_numbered_request(number, request, decoupled, receive, send, counted)
        return number

    def _send_numbered_request(
        self,
        number: int,
        request: WireRequest,
        decoupled: bool,
        receive: WireResponseReceiver,
        send: Callable[[Sequence[ToHost]], None],
        counted: bool = False,
    ) -> None:
        """Sends a request; `counted` if `add_unattended` was called for it."""
        self._bls_receivers[number] = receive, counted
        try:
            self._send_bls_request(
                BlsRequest(number, request, self._batch_of_caller(), False, decoupled), send
            )
        except BaseException:  # the request was not sent; raised again
            self._remove_receiver(number)
            raise
        if self._ended:  # checked after the receiver is registered, or it could be missed
            self._fail_bls_request(number)

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Queues the release of metrics: a finaliser may run inside `send`, and cannot send."""
        self._deferred.append(DropMetrics(list(families), list(metrics)))
        self._wake()

    # BLS

    def check_bls_allowed(self) -> None:
        """Raises TritonModelException unless requests to other models are allowed now."""
        if not self.bls_allowed:
            raise pb_utils.TritonModelException(BLS_NOT_ALLOWED)

    def _to_wire(self, request: RequestFields) -> "Union[WireRequest, pb_utils.InferenceResponse]":
        """Returns the request for the wire, or an error response if it cannot be sent."""
        try:
            return request_to_wire(request, self._memory)
        except (ArenaFull, ConversionError) as problem:
            text = arena_full_message(problem) if isinstance(problem, ArenaFull) else str(problem)
            return pb_utils.InferenceResponse._from_wire([], pb_utils.TritonError(text), None)

    def _batch_of_caller(self) -> int:
        """Returns the batch of the current thread or coroutine, 0 if it is not known."""
        if threading.get_ident() == self.main_thread:
            return self.batch
        return current_batch.get()

    def _cancel_bls_request(self, number: int) -> None:
        """Cancels a request; any thread and finalisers may call it."""
        self._deferred.append(CancelBls(number))
        self._wake()

    def _send_bls_request(
        self, request: BlsRequest, send: Callable[[Sequence[ToHost]], None]
    ) -> None:
        returns = self._memory.take_releases()
        # Releases go first, so that the host can reuse the blocks for the response.
        send([request] if returns is None else [returns, request])

    def _wait_for_bls_response(self, number: int) -> WireResponse:
        """Waits for a response on the main thread; it arrives through the work queue."""
        response: Optional[WireResponse] = None
        while response is None:
            for message in self._channel.receive_work():
                if isinstance(message, BlsResponse) and message.number == number:
                    response = message.response
                else:
                    self._handle_other(message)
        return response

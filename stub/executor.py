"""Runs batches: receives requests, calls `execute`, checks what it returns, sends responses."""

import inspect
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable, Coroutine, List, Optional, Sequence, Tuple

import pb_utils
from pb_utils import _model_texts as texts
from pb_utils._model_code import InvalidReturnValue, call_execute, check_return_value
from stub.batch_tensors import BatchTensorError, BatchTensors
from stub.conversion import error_response, request_from_wire
from stub.coroutines import CoroutineRunner
from stub.memory import SharedMemoryUnavailable, StubMemory
from stub.observability import attach_context, detach_context
from stub.responders import ResponderRegistry, StubResponder
from stub.user_model import UserModel, describe_exception
from stub.wire.arena import Block
from stub.wire.messages import (
    BatchDone,
    Execute,
    Initialize,
    InstanceReleased,
    LogLine,
    Response,
    ToHost,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

_RESCHEDULE = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class RunningBatch:
    """A batch that the model is processing."""

    __slots__ = (
        "batch_done",
        "context",
        "responders",
        "inputs_ready",
        "number",
        "exported",
        "finished",
        "requests",
        "started",
    )

    def __init__(self, batch: Execute) -> None:
        self.number = batch.batch
        self.started = self.inputs_ready = time.monotonic_ns()
        self.requests: List[pb_utils.InferenceRequest] = []
        self.responders: List[StubResponder] = []
        self.exported: List[Block] = []  # blocks of its responses; kept until they are sent
        self.context: Optional[str] = None  # trace context of its first traced request
        self.finished = False  # its coroutine has ended
        self.batch_done = False  # the host was told that the batch ended before its coroutine

    def release(self) -> None:
        """Releases requests and memory, as the messages were sent.

        A request without a final response gets an error response when it is deleted.
        """
        self.requests.clear()
        self.responders.clear()
        self.exported.clear()


class Executor:
    """Runs the batches of one instance on the main thread, and coroutines on the event loop.

    `send` sends the messages that `run_batch` does not return.
    """

    def __init__(
        self,
        model: UserModel,
        initialize: Initialize,
        memory: StubMemory,
        registry: ResponderRegistry,
        coroutines: CoroutineRunner,
        send: Callable[[Sequence[ToHost]], None],
    ) -> None:
        self._model = model
        self._name = initialize.instance_name
        self._outputs = initialize.outputs
        self.decoupled = initialize.decoupled
        self._memory = memory
        self._registry = registry
        self._coroutines = coroutines
        self._send = send
        self.max_concurrent_batches = max(1, initialize.max_concurrent_batches)
        self._free_batches = threading.Semaphore(self.max_concurrent_batches)
        self._unsent_blocks: List[Block] = []
        self._batch_tensors = BatchTensors.from_config(initialize.args["model_config"])

    def run_batch(self, batch: Execute) -> List[ToHost]:
        """Runs a batch; returns the messages for the host."""
        views = self._memory.views
        views.begin_batch(regions=not self.decoupled)
        messages = self._run_requests(batch)
        views.end_batch()  # the model has kept the views that are still alive
        return messages

    def _run_requests(self, batch: Execute) -> List[ToHost]:
        running = RunningBatch(batch)
        token: Any = None
        try:
            self._receive_requests(running, batch)
            if all(responder.cancelled for responder in running.responders):
                return self._skip_cancelled_batch(running)
            if running.context is not None:
                token = attach_context(running.context)
            self._unsent_blocks = running.exported
            returned = call_execute(self._model.instance, self._model.path, running.requests)
            if inspect.iscoroutine(returned):
                if self.decoupled or self.max_concurrent_batches > 1:
                    return self._continue_in_background(running, returned)
                returned = self._coroutines.submit(returned, running.number).result()
            self._memory.execute_returned()
            return self._finish_batch(running, returned)
        except BaseException as error:  # SystemExit as well: all requests fail
            self._memory.execute_returned()
            return self._fail_batch(running, error)
        finally:
            detach_context(token)

    def release_sent_blocks(self) -> None:
        """Releases the blocks of the responses, which have been sent."""
        self._unsent_blocks = []

    def replace_unsendable(self, unsendable: Sequence[ToHost], error: Exception) -> List[ToHost]:
        """Returns error responses for responses that cannot be encoded."""
        text = f"the responses of model '{self._name}' cannot be sent: {error!r}"
        messages: List[ToHost] = []
        for message in unsendable:
            if isinstance(message, Response):
                message = Response(message.batch, message.index, error_response(text))
            elif isinstance(message, BatchDone):
                message.failure = text
            elif isinstance(message, LogLine):
                message.text = text
            messages.append(message)
        return messages

    def _skip_cancelled_batch(self, running: RunningBatch) -> List[ToHost]:
        """Closes all requests of a batch that was cancelled before it began."""
        for responder in running.responders:
            responder.close()
        self._memory.execute_returned()
        self._registry.end_batch(running.responders)
        return [BatchDone(running.number, 0, 0, 0, 0)]

    def _receive_requests(self, running: RunningBatch, batch: Execute) -> None:
        registry, number = self._registry, batch.batch
        for wire in batch.requests:
            index = len(running.responders)
            wanted = wire.outputs or self._outputs
            responder = StubResponder(
                registry,
                number,
                index,
                self.decoupled,
                wanted,
                wire.output_placement,
                wire.max_outstanding_responses,
            )
            running.responders.append(responder)
            if wire.trace is not None and running.context is None:
                running.context = wire.trace.context
        registry.begin_batch(number, running.responders)
        gone: List[Tuple[StubResponder, SharedMemoryUnavailable]] = []
        for wire, responder in zip(batch.requests, running.responders):
            try:
                request = request_from_wire(
                    wire, self._memory, responder, responder.requested_outputs, self.decoupled
                )
            except SharedMemoryUnavailable as error:
                gone.append((responder, error))
            else:
                running.requests.append(request)
        if gone:
            self._fail_requests(running, gone)
        if self._batch_tensors is not None:
            self._batch_tensors.add_batch_inputs(running.requests)
        running.inputs_ready = time.monotonic_ns()

    def _fail_requests(
        self, running: RunningBatch, gone: Sequence[Tuple[StubResponder, SharedMemoryUnavailable]]
    ) -> None:
        """Fails the requests whose shared memory is gone; the others still run.

        Raises SharedMemoryUnavailable if no request is left.
        """
        if not running.requests:
            raise gone[0][1]
        for responder, error in gone:
            running.responders.remove(responder)
            if responder.close():
                response = error_response(self._failure_message(describe_exception(error)))
                self._send([Response(running.number, responder.index, response)])

    # The end of a batch

    def _finish_batch(self, running: RunningBatch, returned: Any) -> List[ToHost]:
        """Answers the requests with what `execute` returned.

        Raises InvalidReturnValue (docs/reference/model-methods.md, "execute: returned responses").
        """
        outputs_begin = time.monotonic_ns()
        exported = running.exported
        messages: List[ToHost] = []
        rescheduled: List[int] = []
        responders = running.responders
        if returned is not None:
            check_return_value(self._name, self.decoupled, running.requests, responders, returned)
            if self._batch_tensors is not None:
                returned = self._batch_tensors.scatter_batch_outputs(running.requests, returned)
            wires = [
                response and responder.to_wire(response, exported)
                for response, responder in zip(returned, responders)
            ]
            for wire, responder in zip(wires, responders):
                if wire is not None and responder.close():
                    messages.append(Response(running.number, responder.index, wire))
            self._memory.export_blocks(exported)
        if len(messages) < len(responders):
            for request, responder in zip(running.requests, responders):
                if request._release_flags == _RESCHEDULE and responder.close():
                    rescheduled.append(responder.index)
        messages.append(self._batch_done(running, outputs_begin, None, rescheduled))
        return messages

    def _fail_batch(self, running: RunningBatch, error: BaseException) -> List[ToHost]:
        """Answers every open request of the batch with the error."""
        is_described = isinstance(error, (InvalidReturnValue, BatchTensorError))
        text = str(error) if is_described else describe_exception(error)
        failure = self._failure_message(text)
        response = error_response(failure)
        messages: List[ToHost] = [
            Response(
                running.number,
                responder.index,
                responder.take_held_response(running.exported) or response,
            )
            for responder in running.responders
            if responder.close()
        ]
        messages.append(self._batch_done(running, time.monotonic_ns(), failure, ()))
        return messages

    def _failure_message(self, text: str) -> str:
        return texts.failed_batch(self._name, text)

    def _batch_done(
        self,
        running: RunningBatch,
        outputs_begin: int,
        failure: Optional[str],
        rescheduled: Sequence[int],
    ) -> BatchDone:
        late = tuple(self._registry.end_batch(running.responders))
        return BatchDone(
            running.number,
            running.started,
            running.inputs_ready,
            outputs_begin,
            time.monotonic_ns(),
            failure,
            late,
            tuple(rescheduled),
        )

    # Coroutine functions, on the event loop

    @property
    def runs_coroutines(self) -> bool:
        """Whether `execute` is a coroutine function, which `run_coroutine` runs."""
        try:
            return inspect.iscoroutinefunction(self._model.instance.execute)
        except Exception:  # of a property or `__getattr__`: each batch reports it to its clients
            return False

    async def run_coroutine(self, running: RunningBatch, batch: Execute) -> List[ToHost]:
        """Runs a batch as a task, in whose first step the requests are received.

        Returns the messages for the host.
        """
        views = self._memory.views
        views.begin_batch(regions=not self.decoupled)
        try:
            self._receive_requests(running, batch)
            if all(responder.cancelled for responder in running.responders):
                return self._skip_cancelled_batch(running)
            if running.context is not None:
                attach_context(running.context)  # of this task
            returned = call_execute(self._model.instance, self._model.path, running.requests)
            if inspect.iscoroutine(returned):
                returned = await returned
            self._memory.execute_returned()
            if running.batch_done:
                return []
            # What a decoupled coroutine returns does not matter.
            return self._finish_batch(running, None if self.decoupled else returned)
        except GeneratorExit:
            raise  # the event loop has ended
        except BaseException as error:  # SystemExit as well: all requests fail
            self._memory.execute_returned()
            return self._fail_coroutine(running, error)
        finally:
            running.finished = True
            views.end_batch()

    def fail_unstarted(
        self, running: RunningBatch, batch: Execute, error: BaseException
    ) -> List[ToHost]:
        """Fails a batch that was cancelled before its first step; returns the messages."""
        running.finished = True
        try:
            self._receive_requests(running, batch)
        except Exception as failure:
            error = failure
        return self._fail_coroutine(running, error)

    def _fail_coroutine(self, running: RunningBatch, error: BaseException) -> List[ToHost]:
        import asyncio  # a model without coroutines starts faster without it

        if not self.decoupled:
            return self._fail_batch(running, error)
        if not isinstance(error, asyncio.CancelledError):
            return self._fail_decoupled_coroutine(running, error)
        return [] if running.batch_done else self._finish_batch(running, None)

    def suspend_coroutine(self, running: RunningBatch) -> List[ToHost]:
        """Called when the first step of a coroutine has ended; returns messages for the host.

        The host may send the next batch, and the coroutine may respond at any time.
        """
        self._memory.views.end_batch()
        late = tuple(self._registry.end_batch(running.responders))
        if not self.decoupled:
            return [InstanceReleased(running.number)]
        now = time.monotonic_ns()
        running.batch_done = True
        return [
            BatchDone(running.number, running.started, running.inputs_ready, now, now, None, late)
        ]

    # Coroutines that a plain function returns

    def _continue_in_background(
        self, running: RunningBatch, coroutine: Coroutine[Any, Any, Any]
    ) -> List[ToHost]:
        """Runs the coroutine in the background, so that the next batch can begin.

        A decoupled model may have any number of coroutines (docs/reference/model-methods.md,
        "Coroutines"). Another model may have `max_concurrent_batches`; at that limit the main
        thread waits.
        """
        self._memory.views.end_batch()  # the coroutine may respond before this method returns
        future = self._coroutines.submit(coroutine, running.number)
        if self.decoupled:
            late = tuple(self._registry.end_batch(running.responders))
            future.add_done_callback(lambda done: self._on_decoupled_coroutine_done(running, done))
            now = time.monotonic_ns()
            started, ready = running.started, running.inputs_ready
            return [BatchDone(running.number, started, ready, now, now, None, late)]
        self._registry.end_batch(running.responders)
        self._free_batches.acquire()
        future.add_done_callback(lambda done: self._on_coroutine_done(running, done))
        with self._free_batches:
            return [InstanceReleased(running.number)]

    def _on_coroutine_done(self, running: RunningBatch, done: "Future[Any]") -> None:
        """Sends the responses of a model that is not decoupled; called on the event loop's thread.

        Requests and responses are kept until then, because the messages refer to their memory.
        """
        try:
            messages = self._finish_batch(running, done.result())
        except BaseException as error:  # SystemExit as well: all requests fail
            messages = self._fail_batch(running, error)
        try:
            self._send_or_replace(messages)
        finally:
            running.requests.clear()
            running.exported.clear()
            self._free_batches.release()

    def _send_or_replace(self, messages: Sequence[ToHost]) -> None:
        try:
            self._send(messages)
        except (TypeError, ValueError, OverflowError) as error:  # a response cannot be encoded
            self._send(self.replace_unsendable(messages, error))

    def _on_decoupled_coroutine_done(self, running: RunningBatch, done: "Future[Any]") -> None:
        """Fails the open requests if the coroutine of a decoupled model raised an exception.

        Called on the event loop's thread.
        """
        running.batch_done = True
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._send_or_replace(self._fail_decoupled_coroutine(running, error))
        running.release()

    def _fail_decoupled_coroutine(
        self, running: RunningBatch, error: BaseException
    ) -> List[ToHost]:
        """Logs the exception of a decoupled coroutine, and answers its open requests with it."""
        response = error_response(self._failure_message(describe_exception(error)))
        messages: List[ToHost] = [
            LogLine(2, "executor.py", 0, _format_traceback(error), running.number)
        ]
        messages += [
            Response(running.number, responder.index, response)
            for responder in running.responders
            if responder.close()
        ]
        if not running.batch_done:
            messages.append(self._batch_done(running, time.monotonic_ns(), None, ()))
        return messages


def _format_traceback(error: BaseException) -> str:
    """Returns the traceback as Python prints it, with unencodable characters escaped."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return texts.limit_text("".join(lines).rstrip()).encode(errors="backslashreplace").decode()

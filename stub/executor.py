"""One batch: requests in, the model's `execute`, its return value checked, responses out."""

import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable, Coroutine, List, Optional, Sequence, Tuple

import pb_utils
from pb_utils._sender import MORE_THAN_ONE
from stub import span
from stub.batch_tensors import BatchTensorError, BatchTensors
from stub.convert import failed, request_from
from stub.coroutines import Coroutines, is_coroutine
from stub.memory import Memory, MemoryGone
from stub.replies import Replies, StubExchange
from stub.user_model import UserModel, describe_exception
from stub.wire.arena import Block
from stub.wire.messages import (
    BatchDone,
    Execute,
    Initialize,
    LogLine,
    Released,
    Respond,
    ToHost,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

_RESCHEDULE = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class BadReturn(Exception):
    """`execute` returned something that cannot be sent."""


class Running:
    """A batch on its way through the model."""

    __slots__ = (
        "context",
        "exchanges",
        "inputs_ready",
        "number",
        "placed",
        "requests",
        "started",
    )

    def __init__(self, batch: Execute) -> None:
        self.number = batch.batch
        self.started = self.inputs_ready = time.monotonic_ns()
        self.requests: List[pb_utils.InferenceRequest] = []
        self.exchanges: List[StubExchange] = []
        self.placed: List[Block] = []  # what its answers refer to; lives until they are sent
        self.context: Optional[str] = None  # of the first request that is part of a trace


class Executor:
    """Runs batches of one instance, on the main thread; coroutines end on their loop.

    `send` takes what the host is told outside of `run`.
    """

    def __init__(
        self,
        model: UserModel,
        become: Initialize,
        memory: Memory,
        replies: Replies,
        coroutines: Coroutines,
        send: Callable[[Sequence[ToHost]], None],
    ) -> None:
        self._model = model
        self._name = become.instance_name
        self._outputs = become.outputs
        self._decoupled = become.decoupled
        self._memory = memory
        self._replies = replies
        self._coroutines = coroutines
        self._send = send
        self._overlap = max(1, become.overlap)
        self._slots = threading.Semaphore(self._overlap)
        self._unsent: List[Block] = []
        self._batch_tensors = BatchTensors.of(become.args["model_config"])

    def run(self, batch: Execute) -> List[ToHost]:
        """What the host is told when the main thread is free again."""
        snapshots = self._memory.snapshots
        snapshots.begin(regions=not self._decoupled)
        messages = self._run(batch)
        snapshots.end()  # what is still alive belongs to the model alone: it has kept it
        return messages

    def _run(self, batch: Execute) -> List[ToHost]:
        running = Running(batch)
        token: Any = None
        try:
            self._receive(running, batch)
            if all(exchange.cancelled for exchange in running.exchanges):
                return self._skip(running)
            if running.context is not None:
                token = span.enter(running.context)
            self._unsent = running.placed
            returned = self._call(running)
            if is_coroutine(returned):
                if self._decoupled or self._overlap > 1:
                    return self._leave_running(running, returned)
                returned = self._coroutines.submit(returned, running.number).result()
            self._memory.leave_batch()
            return self._finish(running, returned)
        except BaseException as error:  # whatever it raised, SystemExit too, is the answer
            self._memory.leave_batch()
            return self._fail(running, error)
        finally:
            span.leave(token)

    def sent(self) -> None:
        """What `run` returned has been sent."""
        self._unsent = []

    def give_up(self, unsendable: Sequence[ToHost], error: Exception) -> List[ToHost]:
        """What the host is told in place of answers that no message can carry."""
        text = f"the answers of model '{self._name}' cannot be sent: {error!r}"
        messages: List[ToHost] = []
        for message in unsendable:
            if isinstance(message, Respond):
                message = Respond(message.batch, message.index, failed(text))
            elif isinstance(message, BatchDone):
                message.failure = text
            elif isinstance(message, LogLine):
                message.text = text
            messages.append(message)
        return messages

    def _skip(self, running: Running) -> List[ToHost]:
        """Nobody waits for the batch: it was cancelled before it began."""
        for exchange in running.exchanges:
            exchange.close()
        self._memory.leave_batch()
        self._replies.end(running.exchanges)
        return [BatchDone(running.number, 0, 0, 0, 0)]

    def _receive(self, running: Running, batch: Execute) -> None:
        replies, number = self._replies, batch.batch
        for wire in batch.requests:
            index = len(running.exchanges)
            wanted = wire.outputs or self._outputs
            exchange = StubExchange(
                replies, number, index, self._decoupled, wanted, wire.slots, wire.window
            )
            running.exchanges.append(exchange)
            if wire.trace is not None and running.context is None:
                running.context = wire.trace.context
        replies.begin(number, running.exchanges)
        gone: List[Tuple[StubExchange, MemoryGone]] = []
        for wire, exchange in zip(batch.requests, running.exchanges):
            try:
                request = request_from(wire, self._memory, exchange, exchange.outputs)
            except MemoryGone as error:
                gone.append((exchange, error))
            else:
                running.requests.append(request)
        if gone:
            self._refuse(running, gone)
        if self._batch_tensors is not None:
            self._batch_tensors.add(running.requests)
        running.inputs_ready = time.monotonic_ns()

    def _refuse(self, running: Running, gone: Sequence[Tuple[StubExchange, MemoryGone]]) -> None:
        """A client has taken its memory away: other clients' requests run without its own."""
        if not running.requests:
            raise gone[0][1]
        for exchange, error in gone:
            running.exchanges.remove(exchange)
            if exchange.close():
                answer = failed(self._failure(describe_exception(error)))
                self._send([Respond(running.number, exchange.index, answer)])

    def _call(self, running: Running) -> Any:
        instance = self._model.instance
        if not hasattr(instance, "execute"):
            raise BadReturn(f"Python model {self._model.path} does not implement `execute` method.")
        return instance.execute(running.requests)

    # The end of a batch

    def _finish(self, running: Running, returned: Any) -> List[ToHost]:
        """Answer what `execute` has returned responses for. Raises BadReturn (spec 2.4)."""
        outputs_begin = time.monotonic_ns()
        placed = running.placed
        messages: List[ToHost] = []
        rescheduled: List[int] = []
        exchanges = running.exchanges
        if returned is not None:
            self._check(running, returned)
            if self._batch_tensors is not None:
                returned = self._batch_tensors.scatter(running.requests, returned)
            answers = [
                response and exchange.wire(response, placed)
                for response, exchange in zip(returned, exchanges)
            ]
            for answer, exchange in zip(answers, exchanges):
                if answer is not None and exchange.close():
                    messages.append(Respond(running.number, exchange.index, answer))
            self._memory.tell(placed)
        if len(messages) < len(exchanges):
            for request, exchange in zip(running.requests, exchanges):
                if request._release_flags == _RESCHEDULE and exchange.close():
                    rescheduled.append(exchange.index)
        messages.append(self._done(running, outputs_begin, None, rescheduled))
        return messages

    def _check(self, running: Running, returned: Any) -> None:
        if self._decoupled:
            raise BadReturn(
                f"Python model '{self._name}' is using the decoupled mode and the execute function"
                " must return None."
            )
        if not isinstance(returned, list):
            raise BadReturn(
                f"Expected a list in the execute return, found type '{type(returned)}'."
            )
        if len(returned) != len(running.requests):
            raise BadReturn(
                "Number of InferenceResponse objects do not match the number of InferenceRequest"
                f" objects. InferenceRequest(s) size is:{len(running.requests)}, and"
                f" InferenceResponse(s) size is:{len(returned)}\n"
            )
        for request, exchange, response in zip(running.requests, running.exchanges, returned):
            if response is None:
                continue
            if request._release_flags == _RESCHEDULE:
                raise BadReturn(
                    "Expected a None object in the execute function return list for reschduled"
                    f" request, found type '{type(response)}'."
                )
            if not isinstance(response, pb_utils.InferenceResponse):
                raise BadReturn(
                    "Expected an 'InferenceResponse' object in the execute function return list,"
                    f" found type '{type(response)}'."
                )
            if exchange.answered:
                raise BadReturn(MORE_THAN_ONE)

    def _fail(self, running: Running, error: BaseException) -> List[ToHost]:
        """Every request of the batch that has not been answered gets the error."""
        told = isinstance(error, (BadReturn, BatchTensorError))
        text = str(error) if told else describe_exception(error)
        failure = self._failure(text)
        answer = failed(failure)
        messages: List[ToHost] = [
            Respond(running.number, exchange.index, exchange.sent(running.placed) or answer)
            for exchange in running.exchanges
            if exchange.close()
        ]
        messages.append(self._done(running, time.monotonic_ns(), failure, ()))
        return messages

    def _failure(self, text: str) -> str:
        return f"Failed to process the request(s) for model '{self._name}', message: {text}"

    def _done(
        self,
        running: Running,
        outputs_begin: int,
        failure: Optional[str],
        rescheduled: Sequence[int],
    ) -> BatchDone:
        late = tuple(self._replies.end(running.exchanges))
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

    # Coroutines

    def _leave_running(self, running: Running, coroutine: Coroutine[Any, Any, Any]) -> List[ToHost]:
        """Let the coroutine go on by itself, and take the next batch.

        A decoupled model may have any number of them (pb_utils spec 2.7), others as many as may
        overlap: with no place left, the main thread waits for one to end.
        """
        self._memory.snapshots.end()  # it may answer before this thread is back
        future = self._coroutines.submit(coroutine, running.number)
        if self._decoupled:
            late = tuple(self._replies.end(running.exchanges))
            future.add_done_callback(lambda done: self._ended_decoupled(running, done))
            now = time.monotonic_ns()
            started, ready = running.started, running.inputs_ready
            return [BatchDone(running.number, started, ready, now, now, None, late)]
        self._replies.end(running.exchanges)
        self._slots.acquire()
        future.add_done_callback(lambda done: self._ended(running, done))
        with self._slots:
            return [Released(running.number)]

    def _ended(self, running: Running, done: "Future[Any]") -> None:
        """A coroutine of an ordinary model has ended; on the loop's thread.

        Its requests and responses live until the answers are sent: these refer to their memory.
        """
        try:
            messages = self._finish(running, done.result())
        except BaseException as error:  # whatever it raised, SystemExit too, is the answer
            messages = self._fail(running, error)
        try:
            self._send_or_give_up(messages)
        finally:
            running.requests.clear()
            running.placed.clear()
            self._slots.release()

    def _send_or_give_up(self, messages: Sequence[ToHost]) -> None:
        try:
            self._send(messages)
        except (TypeError, ValueError, OverflowError) as error:  # no message can carry it
            self._send(self.give_up(messages, error))

    def _ended_decoupled(self, running: Running, done: "Future[Any]") -> None:
        """A coroutine of a decoupled model has ended; on the loop's thread.

        Requests that nobody holds any more then answer for themselves.
        """
        error = None if done.cancelled() else done.exception()
        if error is not None:
            text = f"Failed to process the request(s) for model '{self._name}', message: "
            answer = failed(text + describe_exception(error))
            messages: List[ToHost] = [LogLine(2, "executor.py", 0, _trace(error), running.number)]
            messages += [
                Respond(running.number, exchange.index, answer)
                for exchange in running.exchanges
                if exchange.close()
            ]
            self._send_or_give_up(messages)
        running.requests.clear()
        running.exchanges.clear()


def _trace(error: BaseException) -> str:
    """As Python prints it, without what no message can carry."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return "".join(lines).rstrip().encode(errors="backslashreplace").decode()

"""What `pb_utils` reaches the host through, inside a stub."""

import itertools
import threading
from collections import deque
from typing import Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import pb_utils
from pb_utils._runtime import Receive
from stub.channel import Channel
from stub.convert import Unsendable, no_room, request_to, response_from
from stub.coroutines import current_batch
from stub.host_calls import Queries
from stub.memory import Memory
from stub.wire.arena import ArenaFull, Block
from stub.wire.messages import (
    Answer,
    Ask,
    DropMetrics,
    LogLine,
    ToHost,
    ToStub,
    Withdraw,
)
from stub.wire.payload import (
    WireRequest,
    WireResponse,
)

WireReceive = Callable[[Optional[WireResponse], bool], None]
"""Takes one answer as it came, and whether it is the last; on the service thread."""


class StubRuntime:
    """Fulfils `pb_utils`' runtime over the channel; any thread may call.

    `otherwise` takes messages that come along with an answer; `wake` has `unsaid` called soon.
    """

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        otherwise: Callable[[ToStub], None],
        wake: Callable[[], None],
    ) -> None:
        self.queries = Queries(channel.send, self.unsaid)
        self._channel = channel
        self._memory = memory
        self._otherwise = otherwise
        self._wake = wake
        self._numbers = itertools.count(1)
        self._questions: Dict[int, WireReceive] = {}
        self._unsaid: Deque[ToHost] = deque()
        self._main = threading.main_thread().ident
        self._batch = 0  # the one that the main thread is in, 0 between batches
        self._model_dir = ""
        self._asking_allowed = False

    def lies_in(self, model_dir: str) -> None:
        """The model is known, and its version directory."""
        self._model_dir = model_dir

    def become(self, name: str, model_dir: str) -> None:
        """The instance is known, and its version directory."""
        self.lies_in(model_dir)
        self.queries.become(name)

    def allow_asking(self, allowed: bool) -> None:
        """Whether BLS is possible: from the end of `initialize` to the start of `finalize`."""
        self._asking_allowed = allowed

    def room(self, size: int) -> Tuple[Block, memoryview]:
        """Shared memory for an output, and a view to write it by. Raises ArenaFull."""
        views: List[memoryview] = []
        return self._memory.place_from(size, views.append), views[0]

    def works_in(self, thread: int) -> None:
        """Batches run in that thread, which is not the process's main one."""
        self._main = thread

    def begin(self, batch: int) -> None:
        """The main thread starts a batch."""
        self._batch = batch

    def end(self) -> None:
        """The main thread has left the batch."""
        self._batch = 0

    def answer(self, message: Answer) -> None:
        """Hand an answer to whoever asked."""
        if message.final:
            receive = self._questions.pop(message.number)
        else:
            receive = self._questions[message.number]
        receive(message.response, message.final)

    def unsaid(self) -> List[ToHost]:
        """What finalisers wanted to say since the last call."""
        messages: List[ToHost] = []
        try:
            while True:
                messages.append(self._unsaid.popleft())
        except IndexError:
            return messages  # that was all; another thread may have taken the last ones

    # The seam of pb_utils

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Send a log line; the host decides whether it is shown."""
        self._channel.send([LogLine(level, filename, line, message, self._batch_here())])

    def model_dir(self) -> str:
        """`<model directory>/<version>`."""
        return self._model_dir

    def free_memory(self) -> int:
        """Bytes of the own arena without those that this process itself keeps."""
        return self._memory.free()

    def exec(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        """Ask another model and wait. Every failure but a call out of season is a response."""
        self.check_season()
        wire = self._to_wire(request)
        if isinstance(wire, pb_utils.InferenceResponse):
            return wire
        preferred = request._preferred_memory
        number = next(self._numbers)
        if self._batch and threading.get_ident() == self._main:
            self._send(Ask(number, wire, self._batch, True))
            return response_from(self._receive(number), self._memory, preferred)
        told = threading.Lock()
        told.acquire()
        answers: List[WireResponse] = []

        def receive(response: Optional[WireResponse], final: bool) -> None:
            assert response is not None
            answers.append(response)
            told.release()

        self.ask_wire(number, wire, False, receive)
        told.acquire()
        return response_from(answers[0], self._memory, preferred)

    def ask(
        self, request: pb_utils.InferenceRequest, decoupled: bool, receive: Receive
    ) -> Callable[[], None]:
        """Ask another model and do not wait. Every failure but one out of season is a response."""
        self.check_season()
        wire = self._to_wire(request)
        if isinstance(wire, pb_utils.InferenceResponse):
            receive(wire, True)
            return lambda: None
        preferred = request._preferred_memory
        number = next(self._numbers)

        def receive_wire(response: Optional[WireResponse], final: bool) -> None:
            if response is None:
                receive(None, final)
            else:
                receive(response_from(response, self._memory, preferred), final)

        self.ask_wire(number, wire, decoupled, receive_wire)
        return lambda: self._withdraw(number)

    def ask_wire(
        self, number: int, request: WireRequest, decoupled: bool, receive: WireReceive
    ) -> None:
        """Ask with a number of `next_number`; `receive` is called with every answer."""
        self._questions[number] = receive
        try:
            self._send(Ask(number, request, self._batch_here(), False, decoupled))
        except BaseException:  # it was not asked; raised again
            del self._questions[number]
            raise

    def next_number(self) -> int:
        """A number for a question."""
        return next(self._numbers)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model. Raises TritonModelException."""
        self.queries.load_model(name, config, files)

    def unload_model(self, name: str, dependents: bool) -> None:
        """Begin to unload a model. Raises TritonModelException."""
        self.queries.unload_model(name, dependents)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready. Raises TritonModelException."""
        return self.queries.is_model_ready(name, version)

    def new_metric_family(self, name: str, description: str, kind: int) -> int:
        """The number of a new family. Raises TritonModelException."""
        return self.queries.new_metric_family(name, description, kind)

    def new_metric(
        self, family: int, labels: Mapping[str, object], buckets: Optional[Sequence[float]]
    ) -> int:
        """The number of a new metric. Raises TritonModelException."""
        return self.queries.new_metric(family, labels, buckets)

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Say so; whoever scrapes the host next sees it."""
        self.queries.change_metric(metric, change, value)

    def read_metric(self, metric: int) -> float:
        """The value. Raises TritonModelException."""
        return self.queries.read_metric(metric)

    def drop_metrics(self, families: Sequence[int], metrics: Sequence[int]) -> None:
        """Say so, but later and from another thread: a finaliser may run inside of `send`."""
        self._unsaid.append(DropMetrics(list(families), list(metrics)))
        self._wake()

    def refusal(self, text: str) -> str:
        """The host's text about something that it refused."""
        return self.queries.refusal(text)

    # Asking

    def check_season(self) -> None:
        """Raise TritonModelException unless requests to other models are possible now."""
        if not self._asking_allowed:
            raise pb_utils.TritonModelException(
                "BLS is only supported during the 'execute' function."
            )

    def _to_wire(
        self, request: pb_utils.InferenceRequest
    ) -> "Union[WireRequest, pb_utils.InferenceResponse]":
        """The request for a message; what stands against it as a response."""
        try:
            return request_to(request, self._memory)
        except (ArenaFull, Unsendable) as problem:
            text = no_room(problem) if isinstance(problem, ArenaFull) else str(problem)
            return pb_utils.InferenceResponse._from_wire([], pb_utils.TritonError(text), None)

    def _batch_here(self) -> int:
        """The batch that this thread or coroutine works for, 0 if that is not known."""
        if threading.get_ident() == self._main:
            return self._batch
        return current_batch.get()

    def _withdraw(self, number: int) -> None:
        """Called by anybody, finalisers too."""
        self._unsaid.append(Withdraw(number))
        self._wake()

    def _send(self, ask: Ask) -> None:
        returns = self._memory.ended()
        # What the host gets back first, it can use for the answer.
        self._channel.send([ask] if returns is None else [returns, ask])

    def _receive(self, number: int) -> WireResponse:
        """The answer that the main thread waits for: it comes as work, for it is the work."""
        response: Optional[WireResponse] = None
        while response is None:
            for message in self._channel.receive_work():
                if isinstance(message, Answer) and message.number == number:
                    response = message.response
                else:
                    self._otherwise(message)
        return response

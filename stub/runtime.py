"""What `pb_utils` reaches the host through, inside a stub."""

import itertools
import os
import sys
import threading
from typing import Callable, Dict, Optional, Set

import pb_utils
from stub.channel import Channel
from stub.convert import Handle, Unsendable, no_room, request_to, response_from
from stub.memory import Memory
from stub.wire.arena import ArenaFull
from stub.wire.messages import Answer, Ask, Execute, LogLine, ToStub, WireResponse


class _Question:
    """A BLS request whose answer a thread waits for."""

    __slots__ = ("ready", "response")

    def __init__(self) -> None:
        self.ready = threading.Lock()
        self.ready.acquire()
        self.response: Optional[WireResponse] = None


class StubRuntime:
    """Fulfils `pb_utils`' runtime over the channel; any thread may call."""

    def __init__(
        self, channel: Channel, memory: Memory, otherwise: Callable[[ToStub], None]
    ) -> None:
        """`otherwise` takes messages that come along with an answer."""
        self._channel = channel
        self._memory = memory
        self._otherwise = otherwise
        self._numbers = itertools.count(1)
        self._questions: Dict[int, _Question] = {}
        self._cancelled: Set[Handle] = set()
        self._main = threading.main_thread().ident
        self._pid = os.getpid()
        self._batch = 0  # the one that the main thread is in, 0 between batches
        self._model_dir = ""
        self._asking_allowed = False

    def become(self, model_dir: str) -> None:
        """The model is known: this is its version directory."""
        self._model_dir = model_dir

    def allow_asking(self, allowed: bool) -> None:
        """Whether BLS is possible: from the end of `initialize` to the start of `finalize`."""
        self._asking_allowed = allowed

    def begin(self, batch: Execute) -> None:
        """The main thread starts a batch."""
        self._batch = batch.batch

    def end(self) -> None:
        """The main thread has left the batch."""
        done, self._batch = self._batch, 0
        if self._cancelled:
            self._cancelled = {handle for handle in self._cancelled if handle[0] > done}

    def cancel(self, handle: Handle) -> None:
        """The caller of that request has gone."""
        if handle[0] >= self._batch:
            self._cancelled.add(handle)

    def answer(self, message: Answer) -> None:
        """Wake the thread that asked."""
        question = self._questions.pop(message.number)
        question.response = message.response
        question.ready.release()

    # The seam of pb_utils

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Send a log line; the host decides whether it is shown.

        A forked child of the model has no part in the connection; it prints.
        """
        if os.getpid() != self._pid:
            sys.stderr.write(f"{filename}:{line}] {message}\n")
            return
        self._channel.send([LogLine(level, filename, line, message)])

    def model_dir(self) -> str:
        """`<model directory>/<version>`."""
        return self._model_dir

    def is_cancelled(self, request: pb_utils.InferenceRequest) -> bool:
        """Whether the caller of this incoming request has gone."""
        return request._handle in self._cancelled

    def exec(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        """Ask another model and wait. Every failure but a call out of season is a response."""
        if not self._asking_allowed or os.getpid() != self._pid:
            raise pb_utils.TritonModelException(
                "BLS is only supported during the 'execute' function."
            )
        try:
            wire = request_to(request, self._memory)
        except (ArenaFull, Unsendable) as problem:
            text = no_room(problem) if isinstance(problem, ArenaFull) else str(problem)
            return pb_utils.InferenceResponse._from_wire([], pb_utils.TritonError(text), None)
        number = next(self._numbers)
        if self._batch and threading.get_ident() == self._main:
            self._send(Ask(number, wire, self._batch, True))
            return response_from(self._receive(number), self._memory)
        question = self._questions[number] = _Question()
        self._send(Ask(number, wire, self._batch, False))
        question.ready.acquire()
        assert question.response is not None
        return response_from(question.response, self._memory)

    def _send(self, ask: Ask) -> None:
        memory = self._memory
        returns = memory.ended() if ask.blocking else memory.ended_between_batches()
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

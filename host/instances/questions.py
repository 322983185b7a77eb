"""The requests that one stub's model has sent to other models (BLS), until they are answered."""

from __future__ import annotations

from collections.abc import Callable

from host.errors import HostError, internal
from host.inference import Call, InferRequest, InferResponse
from host.instances.services import HostServices

Answer = Callable[[int, InferResponse, bool], None]
"""Sends the answer to question `number`, and says whether its batch waits for it."""


class Questions:
    """`answer` is called once for each question, but for those that `end` finds open."""

    def __init__(self, services: HostServices, answer: Answer) -> None:
        self.blocking: dict[int, Call] = {}
        """Those that hold up the batch that asked."""
        self._open: dict[int, Call] = {}
        self._services = services
        self._answer = answer

    def start(self, number: int, request: InferRequest, blocking: bool) -> None:
        """Ask a model; one that cannot be asked is an answer too."""

        def answer(response: InferResponse | None, final: bool) -> None:
            self._open.pop(number, None)
            self.blocking.pop(number, None)
            if response is None:
                error = internal("Unexpected empty response.")
                response = InferResponse(request.model_name, -1, error=error)
            self._answer(number, response, blocking)

        try:
            call = self._services.ask(request)
        except HostError as error:
            answer(InferResponse(request.model_name, -1, error=error), True)
            return
        self._open[number] = call
        call.subscribe(answer)
        if blocking and not call.finished:
            self.blocking[number] = call
            self._services.break_circle(call)

    def end(self) -> None:
        """Nobody is left to be answered."""
        open_calls, self._open = self._open, {}
        self.blocking.clear()
        for call in open_calls.values():
            call.cancel()

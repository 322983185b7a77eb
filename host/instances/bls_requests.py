"""The requests that one stub's model has sent to other models (BLS), until they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from host.errors import ErrorCode, HostError, internal
from host.inference.request import Call, InferRequest, InferResponse
from host.instances.services import HostServices

_log = logging.getLogger("pbhost")

Answer = Callable[[int, InferResponse | None, bool, bool], None]
"""Sends an answer to question `number`, None for an end alone; whether it is the last one, and
whether the batch waits for it."""

_PARENT_GONE = "the request was cancelled, for the request on whose behalf it was made was"
_WITHDRAWN = "the model that made the request has cancelled it"


@dataclass(slots=True)
class Question:
    """A request, and on behalf of which batch it is asked, 0 if that is not known."""

    number: int
    request: InferRequest
    batch: int
    blocking: bool
    decoupled: bool


class Questions:
    """`answer` is called until the last answer to each question, but for those `end` finds open."""

    def __init__(self, services: HostServices, answer: Answer) -> None:
        self.blocking: dict[int, Call] = {}
        """Those that hold up the batch that asked."""
        self._open: dict[int, tuple[Question, Call]] = {}
        self._pending: dict[int, tuple[Question, asyncio.Task[None]]] = {}
        self._services = services
        self._answer = answer

    def start(self, question: Question) -> None:
        """Ask a model; one that cannot be asked is an answer too."""
        try:
            check = self._services.models.check(question.request)
            if check is None:
                self._ask(question)
                return
        except HostError as error:
            self._refuse(question, error)
            return
        except Exception:  # a defect: logged, and answered
            self._fail(question)
            return
        task = asyncio.get_running_loop().create_task(self._ask_when_ready(question, check))
        self._pending[question.number] = question, task

    async def _ask_when_ready(self, question: Question, check: Awaitable[None]) -> None:
        """The model is asked first whether it is ready at all."""
        try:
            await check
            self._ask(question)
        except HostError as error:
            self._refuse(question, error)
        except Exception:  # a defect: logged, and answered
            self._fail(question)
        finally:
            self._pending.pop(question.number, None)

    def _ask(self, question: Question) -> None:
        number = question.number
        call = self._services.models.ask(question.request, question.decoupled)

        def answer(response: InferResponse | None, final: bool) -> None:
            if final:
                self._open.pop(number, None)
                self.blocking.pop(number, None)
            if response is None and not question.decoupled:
                empty = internal("Unexpected empty response.")
                response = InferResponse(question.request.model_name, -1, error=empty)
            self._answer(number, response, final, question.blocking)
            if response is not None:
                call.took(response)

        self._open[number] = question, call
        call.subscribe(answer)
        if question.batch and not call.finished:
            if question.blocking:
                self.blocking[number] = call
            self._services.models.break_circle(call)

    def of(self, batch: int) -> list[Call]:
        """What is open on behalf of a batch."""
        return [call for question, call in self._open.values() if question.batch == batch]

    def _refuse(self, question: Question, error: HostError) -> None:
        response = InferResponse(question.request.model_name, -1, error=error)
        self._answer(question.number, response, True, question.blocking)

    def _fail(self, question: Question) -> None:
        """A defect of ours must not leave the model waiting for ever."""
        _log.exception("unexpected failure of a request to '%s'", question.request.model_name)
        self._refuse(question, internal("unexpected failure; the server's log tells more"))

    def withdraw(self, number: int) -> None:
        """The model needs no more answers; those that another model still gives, it gets."""
        if number in self._open:
            self._open[number][1].withdraw(HostError(ErrorCode.CANCELLED, _WITHDRAWN))
        elif number in self._pending:
            question, task = self._pending.pop(number)
            task.cancel()
            self._refuse(question, HostError(ErrorCode.CANCELLED, _WITHDRAWN))

    def abandon(self, batch: int) -> None:
        """All callers of that batch have gone."""
        for question, call in list(self._open.values()):
            if question.batch == batch:
                call.abandon(HostError(ErrorCode.CANCELLED, _PARENT_GONE))
        for question, task in list(self._pending.values()):
            if question.batch == batch:
                del self._pending[question.number]
                task.cancel()
                self._refuse(question, HostError(ErrorCode.CANCELLED, _PARENT_GONE))

    def end(self) -> None:
        """Nobody is left to be answered."""
        pending, self._pending = self._pending, {}
        for _, task in pending.values():
            task.cancel()
        open_calls, self._open = self._open, {}
        self.blocking.clear()
        for _, call in open_calls.values():
            call.cancel()

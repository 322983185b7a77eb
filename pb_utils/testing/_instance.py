"""A model that is initialised in a harness: its batches, run by the rules of a server."""

from __future__ import annotations

import inspect
import threading
import time
import traceback
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as TooLate
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pb_utils import _runtime
from pb_utils._model_config import using_decoupled_model_transaction_policy
from pb_utils._model_exception import TritonModelException
from pb_utils._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, InferenceRequest
from pb_utils._response import InferenceResponse
from pb_utils._sender import MORE_THAN_ONE
from pb_utils.testing._messages import (
    PendingRequest,
    cancelled_event,
    error_response,
    request_as_received,
)
from pb_utils.testing._threads import CallThread, EventLoopThread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pb_utils._runtime import ResponseReceiver, Runtime

_ERROR = 2
_MIN_STOP_SECONDS = (
    5.0  # seconds at least for threads to end, however short a test's own timeout is
)
_NO_RESCHEDULING = (
    "Failed to release request: Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, "
    "while the model is not configured to handle such a flag."
)


class InvalidReturnValue(Exception):
    """``execute`` returned something that a server refuses."""


class Instance:
    """Runs one batch at a time, in whatever thread brings it."""

    def __init__(
        self,
        model: Any,
        config: Mapping[str, Any],
        file: Path,
        name: str,
        runtime: Runtime,
        seconds: float,
    ) -> None:
        """Take a model; ``seconds`` bound every wait for it, ``file`` and ``name`` are told."""
        self.model = model
        self.name = name
        self.timeout = seconds
        self.decoupled = using_decoupled_model_transaction_policy(config)
        self.closed = False
        self.worker = CallThread()
        self._file = file
        self._runtime = runtime
        self._outputs = [output["name"] for output in config["output"]]
        batching = config.get("sequence_batching") or {}
        self._reschedules = bool(batching.get("iterative_sequence"))
        self._loop = EventLoopThread()
        self._busy = threading.RLock()  # a model may ask itself, by way of another one

    def run_batch(
        self, requests: Sequence[InferenceRequest], receives: Sequence[ResponseReceiver]
    ) -> None:
        """Run a batch, and again what it reschedules; late answers come when they come.

        Raises:
            TritonModelException: a server would refuse what ``execute`` returned.
            BaseException: whatever ``execute`` raises. The requests have been failed then.
        """
        end = time.monotonic() + self.timeout
        todo = list(zip(requests, receives))
        while todo:
            if time.monotonic() > end:
                text = f"{self.name} has rescheduled its requests for {self.timeout:g} seconds."
                for _, receive in todo:
                    receive(error_response(text), True)
                raise TritonModelException(text)
            todo = self._run_once(todo)

    def _run_once(
        self, todo: list[tuple[InferenceRequest, ResponseReceiver]]
    ) -> list[tuple[InferenceRequest, ResponseReceiver]]:
        """Run a batch; return what it reschedules."""
        batch: list[InferenceRequest] = []
        pending_requests: list[PendingRequest] = []
        for index, (request, receive) in enumerate(todo):
            wanted = request._requested_output_names or self._outputs
            pending_request = PendingRequest(
                self.decoupled,
                receive,
                cancelled_event(request),
                wanted,
                f"The request at index {index}",
            )
            pending_requests.append(pending_request)
            batch.append(request_as_received(request, pending_request, self._outputs))
        if not self._busy.acquire(timeout=self.timeout):
            text = f"{self.name} still runs another batch after {self.timeout:g} seconds."
            _fail_requests(pending_requests, text)
            raise TritonModelException(text)
        try:
            with _runtime.use(self._runtime, lasting=True):
                self._execute(batch, pending_requests)
        except BaseException as error:  # of the model's author; answered, and raised again
            _fail_requests(pending_requests, self._failure_message(error))
            if isinstance(error, InvalidReturnValue):
                raise TritonModelException(str(error)) from error.__cause__
            raise
        finally:
            self._busy.release()
        return self._rescheduled_requests(todo, batch, pending_requests)

    def _execute(
        self, batch: list[InferenceRequest], pending_requests: list[PendingRequest]
    ) -> None:
        if self.closed:
            raise InvalidReturnValue("The model has been finalized.")
        if not hasattr(self.model, "execute"):
            raise InvalidReturnValue(
                f"Python model {self._file} does not implement `execute` method."
            )
        returned = self.model.execute(list(batch))
        if inspect.iscoroutine(returned):
            if self.decoupled:
                refs = [weakref.ref(pending_request) for pending_request in pending_requests]
                self._loop.submit(returned).add_done_callback(
                    partial(self._on_coroutine_done, refs)
                )
                return
            returned = self._run_coroutine("execute", returned)
        if self.decoupled:
            if returned is not None:
                raise InvalidReturnValue(
                    f"Python model '{self.name}' is using the decoupled mode and the execute "
                    "function must return None."
                )
            return
        for pending_request, response in zip(
            pending_requests, _checked_return_value(returned, batch)
        ):
            if response is None:
                continue
            try:
                pending_request.send(response, True)
            except TritonModelException as error:
                raise InvalidReturnValue(str(error)) from error

    def _on_coroutine_done(
        self, pending_requests: list[weakref.ref[PendingRequest]], done: Future[Any]
    ) -> None:
        """Fail what a coroutine of a decoupled model leaves behind when it raises."""
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._log_exception(error)
            _fail_requests(
                [e for e in (ref() for ref in pending_requests) if e is not None],
                self._failure_message(error),
            )

    def _rescheduled_requests(
        self,
        todo: list[tuple[InferenceRequest, ResponseReceiver]],
        batch: list[InferenceRequest],
        pending_requests: list[PendingRequest],
    ) -> list[tuple[InferenceRequest, ResponseReceiver]]:
        again = []
        for (sent, receive), request, pending_request in zip(todo, batch, pending_requests):
            if request._release_flags != TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                continue
            if not self._reschedules:
                self._runtime.log(_ERROR, self._file.name, 0, _NO_RESCHEDULING)
            elif pending_request.close():
                fresh = request_as_received(sent, pending_request, ())
                fresh._flags = 0
                again.append((fresh, receive))
        return again

    def submit_batch(
        self, requests: Sequence[InferenceRequest], receives: Sequence[ResponseReceiver]
    ) -> None:
        """Run a batch on the model's own thread; what it raises is told and logged."""

        def call() -> None:
            try:
                self.run_batch(requests, receives)
            except BaseException as error:  # as a server does, whose process lives on
                self._log_exception(error)

        self.worker.submit(call)

    def is_ready(self) -> bool:
        """Return what the model's ``is_ready`` says, True if it has none.

        Raises:
            TritonModelException: it says something else, or nothing in time.
            Exception: whatever it raises.
        """
        if not hasattr(self.model, "is_ready"):
            return True
        with _runtime.use(self._runtime, lasting=True):
            ready = self.model.is_ready()
            if inspect.iscoroutine(ready):
                ready = self._run_coroutine("is_ready", ready)
        if not isinstance(ready, bool):
            raise TritonModelException("is_ready() must return a boolean value")
        return ready

    def accepts_requests(self) -> bool:
        """Return whether ``is_ready`` says so; what it raises is a no, and is logged."""
        try:
            return self.is_ready()
        except Exception as error:  # of the model's author; it is logged
            self._log_exception(error)
            return False

    def close(self) -> None:
        """Let the batches end, and stop the loop.

        Raises:
            TritonModelException: a batch does not end.
        """
        seconds = max(self.timeout, _MIN_STOP_SECONDS)
        ended = self.worker.stop(seconds)
        self._loop.stop(seconds)
        if not ended:
            raise TritonModelException(f"{self.name} still runs a batch after {seconds:g} seconds.")

    def _run_coroutine(self, function: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = self._loop.submit(coroutine)
        try:
            return future.result(self.timeout)
        except TooLate:
            if future.done():  # the model itself raised it
                raise
            future.cancel()
            raise TritonModelException(
                f"{function} of {self.name} has not returned within {self.timeout:g} seconds."
            ) from None
        except CancelledError:
            raise TritonModelException(f"{function} of {self.name} was cancelled.") from None

    def _failure_message(self, error: BaseException) -> str:
        text = (
            str(error)
            if isinstance(error, InvalidReturnValue)
            else f"{type(error).__name__}: {error}"
        )
        return f"Failed to process the request(s) for model '{self.name}', message: {text}"

    def _log_exception(self, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._runtime.log(_ERROR, self._file.name, 0, trace)


def _fail_requests(pending_requests: Sequence[PendingRequest], text: str) -> None:
    for pending_request in pending_requests:
        pending_request.fail(text)


def _checked_return_value(
    returned: Any, requests: list[InferenceRequest]
) -> list[InferenceResponse | None]:
    """Return what ``execute`` of a model that is not decoupled returned, if a server accepts it.

    Raises:
        InvalidReturnValue: it does not (docs/reference/model_api.md, 2.4).
    """
    if returned is None:
        return [None] * len(requests)
    if not isinstance(returned, list):
        raise InvalidReturnValue(
            f"Expected a list in the execute return, found type '{type(returned)}'."
        )
    if len(returned) != len(requests):
        raise InvalidReturnValue(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size "
            f"is:{len(returned)}\n"
        )
    for request, response in zip(requests, returned):
        rescheduled = request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        if rescheduled and response is not None:
            raise InvalidReturnValue(
                "Expected a None object in the execute function return list for reschduled "
                f"request, found type '{type(response)}'."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise InvalidReturnValue(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
        pending_request = request._handle
        if response is not None and pending_request is not None and pending_request.has_response:
            raise InvalidReturnValue(MORE_THAN_ONE)
    return returned

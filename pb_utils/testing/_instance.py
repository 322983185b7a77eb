"""The instance of a model in a test: runs batches by the rules of a server."""

from __future__ import annotations

import inspect
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pb_utils import _model_texts as texts
from pb_utils import _runtime
from pb_utils._event_loop import EventLoopThread
from pb_utils._exceptions import TritonModelException
from pb_utils._model_code import (
    InvalidReturnValue,
    call_execute,
    check_return_value,
    defines,
    describe_undeclared,
)
from pb_utils._model_config import using_decoupled_model_transaction_policy
from pb_utils._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, InferenceRequest
from pb_utils.testing._messages import (
    PendingRequest,
    cancelled_event,
    error_response,
    request_as_received,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pb_utils._response import InferenceResponse
    from pb_utils._runtime import ResponseReceiver, Runtime

_ERROR = 2
_MIN_STOP_SECONDS = 5.0  # seconds; the minimum time for threads to stop


class CallThread:
    """A thread that runs functions one after the other. It starts with the first function."""

    def __init__(self) -> None:
        """Creates the object; the thread starts with the first function."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Runs a function after the earlier ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pb_utils-model", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def stop(self, seconds: float) -> bool:
        """Waits until all functions have ended. Returns False if the time, in seconds, is over."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            del call  # it may refer to requests


class Instance:
    """Runs batches on a model, one at a time, in the threads of their callers."""

    def __init__(
        self,
        model: Any,
        config: Mapping[str, Any],
        file: Path,
        name: str,
        runtime: Runtime,
        response_timeout: float,
    ) -> None:
        """Creates the instance of an initialised model.

        Args:
            model: the object of the model's class.
            config: the complete configuration.
            file: the model's file, for error texts.
            name: name of the instance, for error texts.
            runtime: the runtime for the model's calls of the API.
            response_timeout: time limit in seconds for each wait for the model.
        """
        self.model = model
        self.name = name
        self.timeout = response_timeout
        self.decoupled = using_decoupled_model_transaction_policy(config)
        self.closed = False
        self.worker = CallThread()
        self._file = file
        self._runtime = runtime
        self._model_name = str(config["name"])
        self._outputs = [output["name"] for output in config["output"]]
        batching = config.get("sequence_batching") or {}
        self._states = {state["output_name"] for state in batching.get("state", ())}
        self._reschedules = bool(batching.get("iterative_sequence"))
        self._loop = EventLoopThread()
        # Reentrant, because a model may call itself through another model.
        self._execute_lock = threading.RLock()

    def run_batch(
        self, requests: Sequence[InferenceRequest], receivers: Sequence[ResponseReceiver]
    ) -> None:
        """Runs a batch, and runs it again while the model reschedules requests.

        Responses that the model sends after ``execute`` reach their receivers later.

        Args:
            requests: the requests.
            receivers: functions that get the responses, one for each request.

        Raises:
            TritonModelException: a server would reject what ``execute`` returned.
            BaseException: any exception of ``execute``. All receivers have got an error before.
        """
        end = time.monotonic() + self.timeout
        entries = list(zip(requests, receivers))
        while entries:
            if time.monotonic() > end:
                text = f"{self.name} has rescheduled its requests for {self.timeout:g} seconds."
                for _, receive in entries:
                    receive(error_response(text), True)
                raise TritonModelException(text)
            entries = self._run_once(entries)

    def _run_once(
        self, entries: list[tuple[InferenceRequest, ResponseReceiver]]
    ) -> list[tuple[InferenceRequest, ResponseReceiver]]:
        """Runs a batch once. Returns the rescheduled requests."""
        batch: list[InferenceRequest] = []
        pending_requests: list[PendingRequest] = []
        for index, (request, receive) in enumerate(entries):
            requested_outputs = request._requested_output_names or self._outputs
            pending_request = PendingRequest(
                self.decoupled,
                receive,
                cancelled_event(request),
                requested_outputs,
                f"The request at index {index}",
                self._find_fault,
            )
            pending_requests.append(pending_request)
            batch.append(request_as_received(request, pending_request, self._outputs))
        if not self._execute_lock.acquire(timeout=self.timeout):
            text = f"{self.name} still runs another batch after {self.timeout:g} seconds."
            _fail_requests(pending_requests, text)
            raise TritonModelException(text)
        try:
            with _runtime.use(self._runtime, persistent=True):
                self._execute(batch, pending_requests)
        except BaseException as error:  # fails the requests, and is raised again
            _fail_requests(pending_requests, self._failure_message(error))
            if isinstance(error, InvalidReturnValue):
                raise TritonModelException(str(error)) from error.__cause__
            raise
        finally:
            self._execute_lock.release()
        return self._rescheduled_requests(entries, batch, pending_requests)

    def _execute(
        self, batch: list[InferenceRequest], pending_requests: list[PendingRequest]
    ) -> None:
        if self.closed:
            raise InvalidReturnValue("The model has been finalized.")
        returned = call_execute(self.model, self._file, list(batch))
        if inspect.iscoroutine(returned):
            if self.decoupled:
                refs = [weakref.ref(pending_request) for pending_request in pending_requests]
                self._submit(returned).add_done_callback(partial(self._on_coroutine_done, refs))
                return
            returned = self._run_coroutine("execute", returned)
        if returned is None:
            return
        check_return_value(self.name, self.decoupled, batch, pending_requests, returned)
        for pending_request, response in zip(pending_requests, returned):
            if response is None:
                continue
            try:
                pending_request.send(response, True)
            except TritonModelException as error:
                raise InvalidReturnValue(str(error)) from error

    def _on_coroutine_done(
        self, pending_requests: list[weakref.ref[PendingRequest]], done: Future[Any]
    ) -> None:
        """Fails the open requests if the coroutine of a decoupled model raised."""
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
        entries: list[tuple[InferenceRequest, ResponseReceiver]],
        batch: list[InferenceRequest],
        pending_requests: list[PendingRequest],
    ) -> list[tuple[InferenceRequest, ResponseReceiver]]:
        rescheduled = []
        for (sent, receive), request, pending_request in zip(entries, batch, pending_requests):
            if request._release_flags != TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                continue
            if not self._reschedules:
                self._runtime.log(_ERROR, self._file.name, 0, texts.NOT_RESCHEDULED)
            elif pending_request.close():
                fresh = request_as_received(sent, pending_request, ())
                fresh._flags = 0
                rescheduled.append((fresh, receive))
        return rescheduled

    def _find_fault(self, response: InferenceResponse) -> str | None:
        """Returns the error of a response with outputs that the configuration does not have.

        A server only warns of them, but the test is there to find such mistakes.
        """
        if not self._outputs:  # the test gave no configuration
            return None
        outputs = [one for one in response._output_tensors if one._name not in self._states]
        return describe_undeclared(self._model_name, outputs, self._outputs)

    def submit_batch(
        self, requests: Sequence[InferenceRequest], receivers: Sequence[ResponseReceiver]
    ) -> None:
        """Runs a batch on the instance's own thread. Exceptions are logged."""

        def call() -> None:
            try:
                self.run_batch(requests, receivers)
            except BaseException as error:  # as in a server, the instance continues
                self._log_exception(error)

        self.worker.submit(call)

    def is_ready(self) -> bool:
        """Returns the result of the model's ``is_ready``; True if it does not define it.

        Raises:
            TritonModelException: the result is not a bool, or does not arrive in time.
            Exception: any exception of ``is_ready``.
        """
        if not defines(self.model, "is_ready"):
            return True
        with _runtime.use(self._runtime, persistent=True):
            ready = self.model.is_ready()
            if inspect.iscoroutine(ready):
                ready = self._run_coroutine("is_ready", ready)
        if not isinstance(ready, bool):
            raise TritonModelException(texts.IS_READY_NO_BOOL)
        return ready

    def report_expired_sequences(self, correlation_ids: Sequence[int | str]) -> None:
        """Calls the model's ``sequences_expired``, if it defines it, once no batch runs.

        Raises:
            TritonModelException: another batch runs, or a coroutine does not end, in time.
            Exception: any exception of ``sequences_expired``.
        """
        if not defines(self.model, "sequences_expired"):
            return
        if not self._execute_lock.acquire(timeout=self.timeout):
            raise TritonModelException(
                f"{self.name} still runs a batch after {self.timeout:g} seconds."
            )
        try:
            with _runtime.use(self._runtime, persistent=True):
                result = self.model.sequences_expired(list(correlation_ids))
                if inspect.iscoroutine(result):
                    self._run_coroutine("sequences_expired", result)
        finally:
            self._execute_lock.release()

    def accepts_requests(self) -> bool:
        """Returns whether ``is_ready`` returns True. An exception is logged and counts as False."""
        try:
            return self.is_ready()
        except Exception as error:  # any exception of the model; it is logged
            self._log_exception(error)
            return False

    def close(self) -> None:
        """Waits for running batches, and stops the event loop.

        Raises:
            TritonModelException: a batch still runs at the time limit.
        """
        seconds = max(self.timeout, _MIN_STOP_SECONDS)
        ended = self.worker.stop(seconds)
        self._loop.stop(seconds)
        if not ended:
            raise TritonModelException(f"{self.name} still runs a batch after {seconds:g} seconds.")

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        import asyncio  # a model without coroutines starts faster without it

        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.get_loop())

    def _run_coroutine(self, function: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = self._submit(coroutine)
        try:
            return future.result(self.timeout)
        except FutureTimeoutError:
            if future.done():  # the coroutine itself raised it
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
        return texts.failed_batch(self.name, text)

    def _log_exception(self, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._runtime.log(_ERROR, self._file.name, 0, trace)


def _fail_requests(pending_requests: Sequence[PendingRequest], text: str) -> None:
    for pending_request in pending_requests:
        pending_request.fail(text)

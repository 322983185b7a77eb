"""The event loop of a model whose `execute` is a coroutine function, and calls of `is_ready`."""

import contextvars
import inspect
import threading
from typing import TYPE_CHECKING, Any, Callable, Coroutine, Sequence

from pb_utils._event_loop import EventLoopThread
from pb_utils._model_texts import IS_READY_NO_BOOL
from stub.user_model import UserModel, describe_exception
from stub.wire.messages import ReadinessResult, ToHost

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future


current_batch: "contextvars.ContextVar[int]" = contextvars.ContextVar("pbhost_batch", default=0)
"""The batch of a coroutine and of the tasks that it creates."""


class CoroutineRunner(EventLoopThread):
    """The event loop of an instance."""

    def submit(self, coroutine: Coroutine[Any, Any, Any], batch: int) -> "Future[Any]":
        """Runs a coroutine of a batch on the loop.

        Raises RuntimeError if a model has closed it, and what `get_loop` raises.
        """
        from concurrent.futures import Future  # a model without coroutines starts faster without it

        context = contextvars.copy_context()
        context.run(current_batch.set, batch)
        result: Future[Any] = Future()
        # Not `run_coroutine_threadsafe`: it makes another future, and one more turn of the loop.
        try:
            loop = self.get_loop()
            loop.call_soon_threadsafe(_start_task, loop, coroutine, result, context=context)
        except (RuntimeError, OSError):
            coroutine.close()
            raise
        return result


class _ExitRaised:
    """The SystemExit or KeyboardInterrupt of a coroutine, which must not end the event loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _catch_exit(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine; returns an exception that would end the event loop as a result."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        return _ExitRaised(error)


def _start_task(
    loop: "asyncio.AbstractEventLoop",
    coroutine: Coroutine[Any, Any, Any],
    result: "Future[Any]",
) -> None:
    """Starts a coroutine on the loop's thread, in the present context."""
    task = loop.create_task(_catch_exit(coroutine))
    task.add_done_callback(lambda done: _copy_outcome(done, result))


def _copy_outcome(done: "asyncio.Future[Any]", result: "Future[Any]") -> None:
    if done.cancelled():
        result.cancel()
        result.set_running_or_notify_cancel()
        return
    error = done.exception()
    returned = None if error is not None else done.result()
    if isinstance(returned, _ExitRaised):
        error = returned.error
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(returned)


class ReadinessChecker:
    """Runs each check on a new thread, because the service thread must not wait for user code."""

    def __init__(
        self,
        model: UserModel,
        name: str,
        coroutines: CoroutineRunner,
        send: Callable[[Sequence[ToHost]], None],
    ) -> None:
        self._model = model
        self._name = name
        self._coroutines = coroutines
        self._send = send

    @property
    def defines_is_ready(self) -> bool:
        """Whether the model defines `is_ready`."""
        return self._model.defines("is_ready")

    def start_check(self, number: int) -> None:
        """Starts a check; the host starts the next one after it has this one's result."""
        thread = threading.Thread(target=self._run_check, args=(number,), daemon=True)
        thread.name = "pbhost-is-ready"
        try:
            thread.start()
        except RuntimeError as error:  # no more threads are allowed
            self._send([ReadinessResult(number, False, describe_exception(error))])

    def _run_check(self, number: int) -> None:
        try:
            result = self._model.instance.is_ready()
            if inspect.iscoroutine(result):
                result = self._coroutines.submit(result, 0).result()
        except BaseException as error:  # the exception is the reason that the client sees
            self._send([ReadinessResult(number, False, describe_exception(error))])
            return
        if not isinstance(result, bool):
            self._send([ReadinessResult(number, False, IS_READY_NO_BOOL)])
            return
        reason = "" if result else f"Model '{self._name}' is not ready (user-defined check failed)."
        self._send([ReadinessResult(number, result, reason)])

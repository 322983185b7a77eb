"""The event loop of a model whose `execute` is a coroutine function."""

import contextvars
import inspect
import threading
import traceback
from typing import TYPE_CHECKING, Any, Callable, Coroutine, Optional

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

_STOP_SECONDS = 5.0  # for cancelled tasks to end

current_batch: "contextvars.ContextVar[int]" = contextvars.ContextVar("pbhost_batch", default=0)
"""The batch of a coroutine and of the tasks that it creates."""


class CoroutineRunner:
    """An event loop in a daemon thread, created for the first coroutine."""

    def __init__(self, started: Callable[[int], None], stopped: Callable[[], None]) -> None:
        """Calls `started` once with the identifier of the loop's thread, and `stopped` on it."""
        self._on_start = started
        self._on_stop = stopped
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._thread: Optional[threading.Thread] = None
        self._lock = threading.Lock()
        self._stopping = False
        self._ending: Optional[asyncio.Task[None]] = None  # what ends the others

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

    def get_loop(self) -> "asyncio.AbstractEventLoop":
        """Returns the event loop, which it starts if it does not run.

        Raises RuntimeError or OSError if no more threads or descriptors are allowed.
        """
        import asyncio

        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=self._run, args=(loop,), name="pbhost-asyncio", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            return self._loop

    def _run(self, loop: "asyncio.AbstractEventLoop") -> None:
        import asyncio

        self._on_start(threading.get_ident())
        asyncio.set_event_loop(loop)
        while not self._stopping:  # `stop` of a model has no effect: the loop reads its requests
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                traceback.print_exc()  # a task of the model has failed
        loop.close()
        self._on_stop()

    def stop(self) -> None:
        """Cancels the tasks and stops the loop; does not wait for tasks that refuse to end."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        try:
            loop.call_soon_threadsafe(self._begin_to_end, loop)
        except RuntimeError:
            return  # the thread has closed the loop just now
        thread.join(2 * _STOP_SECONDS)  # a coroutine may block the loop

    def _begin_to_end(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Starts to end the tasks, on the loop's thread: a loop that ends first makes none."""
        if self._ending is None:
            self._ending = loop.create_task(self._end_tasks())

    async def _end_tasks(self) -> None:
        import asyncio

        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            ended = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait([ended], timeout=_STOP_SECONDS)
        self._stopping = True
        asyncio.get_running_loop().stop()


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


def is_coroutine(returned: object) -> bool:
    """Whether `execute`, or `is_ready`, was a coroutine function."""
    return inspect.iscoroutine(returned)

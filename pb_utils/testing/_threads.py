"""The threads of a model in a test: one for batches, and one for the event loop of coroutines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future


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


class EventLoopThread:
    """An event loop in a thread of its own. Both start with the first coroutine."""

    def __init__(self) -> None:
        """Creates the object; the event loop starts with the first coroutine."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine in a copy of the current context."""
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="pb_utils-loop", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, seconds: float) -> None:
        """Cancels running tasks, and stops the loop unless a task does not end in time."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        import asyncio
        from concurrent.futures import TimeoutError as FutureTimeoutError

        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(seconds)
        except FutureTimeoutError:
            return  # the thread is a daemon and ends with the process
        loop.call_soon_threadsafe(loop.stop)
        thread.join(seconds)
        loop.close()


async def _cancel_all() -> None:
    import asyncio

    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""The event loop of a model with coroutines."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


_STOP_SECONDS = 5.0  # for cancelled tasks to end


class EventLoopThread:
    """An event loop in a daemon thread, created for the first coroutine."""

    def __init__(
        self,
        started: Callable[[int], None] = lambda thread: None,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates the object, without a thread.

        Args:
            started: called on the new thread, with its identifier, before the loop runs.
            stopped: called on the thread when the loop is closed.
        """
        self._on_start = started
        self._on_stop = stopped
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._ending: asyncio.Task[None] | None = None  # what ends the others

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the event loop, which it starts if it does not run.

        Raises:
            RuntimeError: no more threads are allowed.
            OSError: no more descriptors are allowed.
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

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
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

    def stop(self, seconds: float | None = None) -> None:
        """Cancels the tasks and stops the loop.

        Args:
            seconds: how long tasks have to end, by default 5 seconds; it does not wait for those
                that refuse.
        """
        if seconds is None:
            seconds = _STOP_SECONDS
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        try:
            loop.call_soon_threadsafe(self._begin_to_end, loop, seconds)
        except RuntimeError:
            return  # the thread has closed the loop just now
        thread.join(2 * seconds)  # a coroutine may block the loop

    def _begin_to_end(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Starts to end the tasks, on the loop's thread: a loop that ends first makes none."""
        if self._ending is None:
            self._ending = loop.create_task(self._end_tasks(seconds))

    async def _end_tasks(self, seconds: float) -> None:
        import asyncio

        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            ended = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait([ended], timeout=seconds)
        self._stopping = True
        asyncio.get_running_loop().stop()

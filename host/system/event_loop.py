"""The event loop of a process of its own, and coroutines that run in it at the same time.

The loop needs no new thread while it runs and to end: at the limit of processes and threads, none
can be started. At that of open files, it cannot be run a second time, as each run opens two
descriptors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

_Result = TypeVar("_Result")


class _WorkerThreads(ThreadPoolExecutor):
    """Does with the threads that it has if no other one can be started. The first starts now."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self.submit(int).result()

    def _adjust_thread_count(self) -> None:  # of ThreadPoolExecutor: starts a thread if all work
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


class _EventLoop(uvloop.Loop):
    def __init__(self) -> None:
        super().__init__()
        self._workers = _WorkerThreads()
        self.set_default_executor(self._workers)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Waits for the threads here: the method of the base class starts one to wait for them."""
        self._workers.shutdown()


def run_event_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    """As `uvloop.run`, but runs the loop once, and leaves SIGINT as it is."""
    loop = _EventLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_run_to_end(main))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _run_to_end(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Cancels all tasks that `main` leaves, and ends what belongs to the loop."""
    loop = asyncio.get_running_loop()
    try:
        return await main
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        for outcome in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(outcome, Exception):
                text = "unhandled exception of a task at the end of the event loop"
                loop.call_exception_handler({"message": text, "exception": outcome})
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()


async def run_in_thread(
    run: Callable[[], _Result], discard: Callable[[_Result], object] | None = None
) -> _Result:
    """As `asyncio.to_thread`, but a cancellation waits for the end of the thread.

    What the thread uses may be closed or unlocked afterwards. `discard` takes the result that a
    cancelled caller does not get.
    """
    running = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if running.exception() is None and discard is not None:
            discard(running.result())
        raise


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines at the same time; the first error cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

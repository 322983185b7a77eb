"""Runs the batches of a model whose `execute` is a coroutine function."""

import contextvars
import sys
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Callable, Deque, Dict, List, Optional, Sequence, Tuple, Union

from stub.coroutines import CoroutineRunner, current_batch
from stub.executor import Executor, RunningBatch
from stub.memory import StubMemory
from stub.stub_channel import Channel, HostGone
from stub.wire.messages import Execute, Finalize, ToHost, ToStub

if TYPE_CHECKING:
    import asyncio


class CoroutineBatches:
    """Runs each batch as a task of the event loop, which reads the work of the stub itself.

    So no request has to wait for a second thread. The main thread waits for the end of the stub
    meanwhile. Batches of a decoupled model overlap without a limit.
    """

    def __init__(
        self,
        executor: Executor,
        channel: Channel,
        memory: StubMemory,
        coroutines: CoroutineRunner,
        handle_other: Callable[[ToStub], None],
        end_batch: Callable[[List[ToHost], Callable[[], None]], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Stores what it works with.

        `handle_other` handles the messages that are no batches, on the event loop's thread.
        `end_batch` sends the messages of a batch that has ended, then calls the function to release
        its memory. `on_failure` is called after a bug of this project.
        """
        self._executor = executor
        self._channel = channel
        self._memory = memory
        self._coroutines = coroutines
        self._handle_other = handle_other
        self._end_batch = end_batch
        self._on_failure = on_failure
        self._limit = sys.maxsize if executor.decoupled else executor.max_concurrent_batches
        self._pending: Deque[Execute] = deque()
        # The tasks too, as asyncio keeps weak references only.
        self._running: Dict[RunningBatch, Tuple[Execute, asyncio.Task[None]]] = {}
        self._latest: Optional[RunningBatch] = None
        # What tells the host that the latest batch leaves room for another one, once it does.
        self._withheld: Sequence[ToHost] = ()
        self._context = contextvars.copy_context()
        self._for_main: SimpleQueue[Union[Finalize, HostGone]] = SimpleQueue()

    def start(self) -> None:
        """Lets the event loop read the work from now on."""
        self._loop = self._coroutines.get_loop()
        self._loop.call_soon_threadsafe(self._attach)

    def receive_work(self) -> List[ToStub]:
        """Waits for what the main thread has to do. Raises HostGone."""
        received = self._for_main.get()
        if isinstance(received, HostGone):
            raise received
        return [received]

    def finalize(self, message: Finalize) -> None:
        """Lets `receive_work` return the message, although the event loop may be blocked."""
        self._for_main.put(message)

    # On the thread of the event loop

    def _attach(self) -> None:
        self._loop.add_reader(self._channel.work_event, self._read_work)
        self._read_work()  # some may have arrived before

    def _read_work(self) -> None:
        try:
            # While a coroutine waits, its event may be next.
            for message in self._channel.receive_announced_work(busy_poll=not self._running):
                if isinstance(message, Execute):
                    self._pending.append(message)
                else:
                    self._handle_other(message)
            self._start_pending()
        except HostGone as gone:
            self._loop.remove_reader(self._channel.work_event)
            self._for_main.put(gone)
        except BaseException:  # a bug
            self._on_failure()

    def _start_pending(self) -> None:
        while self._pending and len(self._running) < self._limit:
            batch = self._pending.popleft()
            running = self._latest = RunningBatch(batch)
            context = self._context.copy()
            context.run(current_batch.set, batch.batch)
            context.run(self._start_task, running, batch)

    def _start_task(self, running: RunningBatch, batch: Execute) -> None:
        import asyncio  # a model without coroutines starts faster without it

        # Not `create_task`: a task factory of the model may take the first step at once.
        task = asyncio.Task(self._run(running, batch), loop=self._loop)
        self._running[running] = batch, task
        # This is called before the first step of the next batch.
        self._loop.call_soon(self._on_first_step_ended, running)

    def _on_first_step_ended(self, running: RunningBatch) -> None:
        if running.finished:
            return
        batch, task = self._running[running]
        if task.cancelled():  # by the model, before `_run` could begin
            import asyncio

            error = asyncio.CancelledError()
            self._end_task(running, self._executor.fail_unstarted(running, batch, error))
            return
        messages = self._executor.suspend_coroutine(running)
        if running is self._latest and len(self._running) >= self._limit:
            self._withheld = messages
        else:
            self._channel.send(messages)
        returns = self._memory.end_batch()
        if returns is not None:
            self._channel.send([returns])

    async def _run(self, running: RunningBatch, batch: Execute) -> None:
        self._memory.begin_batch(len(batch.requests))
        self._end_task(running, await self._executor.run_coroutine(running, batch))

    def _end_task(self, running: RunningBatch, messages: List[ToHost]) -> None:
        try:
            self._end_batch(messages, running.release)
            del self._running[running]
            if running is not self._latest and self._withheld:
                self._channel.send(self._withheld)
            self._withheld = ()  # the end of the latest batch tells the host as much
            self._start_pending()
        except BaseException:  # a bug
            self._on_failure()

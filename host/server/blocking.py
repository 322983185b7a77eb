"""The server for code without `await`: scripts and notebooks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from host.errors import unavailable
from host.inference.request import Result
from host.options.options import Options
from host.server.in_process import Arrays
from host.server.server import Server

_Result = TypeVar("_Result")


class BlockingServer:
    """A `Server` whose event loop runs in a thread of its own.

    `with BlockingServer(Options(model_repository=["models"])) as server: ...`
    """

    def __init__(self, options: Options) -> None:
        self._server = Server(options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="pbhost-loop", daemon=True
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._process = 0  # the process that started it
        self._running = False
        self._state_lock = threading.Lock()  # no call is passed to a loop that is about to end

    @property
    def grpc_port(self) -> int:
        """The gRPC port; 0 before the start."""
        return self._server.grpc_port

    @property
    def metrics_port(self) -> int:
        """The metrics port; 0 before the start."""
        return self._server.metrics_port

    def start(self) -> BlockingServer:
        """Starts the server, once, as `Server.start`. Raises HostError."""
        with self._state_lock:
            if self._thread.ident is not None:
                raise unavailable("this server has been started before; create a new one")
            self._thread.start()
            self._process, self._running = os.getpid(), True
        try:
            self._run(self._server.start())
        except BaseException:  # Ctrl-C interrupts this thread, not that of the loop
            self._stop_loop()
            raise
        return self

    def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: int = -1,
        request_id: str = "",
        outputs: Sequence[str] = (),
        parameters: dict[str, bool | int | float | str] | None = None,
    ) -> Result:
        """As `Server.infer`; any thread may call. Raises HostError."""
        return self._run(
            self._server.infer(
                model,
                inputs,
                version=version,
                request_id=request_id,
                outputs=outputs,
                parameters=parameters,
            )
        )

    def stop(self) -> bool:
        """As `Server.stop`. Does nothing if the server does not run, or runs in another process."""
        if not self._running or os.getpid() != self._process:
            return True
        try:
            return self._run(self._server.stop())
        finally:
            self._stop_loop()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        with self._state_lock:
            if not self._running or os.getpid() != self._process:
                work.close()
                raise unavailable("this server does not run in this process: start it, or make one")
            future = asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, or a failure: stop in any case
            future.cancel()
            raise

    async def _tracked(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def _finish_tasks(self) -> None:
        """Waits for tasks that clean up, then cancels the others."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest)
        await self._loop.shutdown_default_executor()

    def _stop_loop(self) -> None:
        with self._state_lock:
            if not self._running:
                return  # another thread has stopped the server
            self._running = False
        asyncio.run_coroutine_threadsafe(self._finish_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> BlockingServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

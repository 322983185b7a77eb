"""The server for code without `await`: scripts and notebooks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from host.errors import HostError, unavailable
from host.inference.request import Result
from host.model_control.control import LoadParameters
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
    def http_port(self) -> int:
        """The HTTP port; 0 before the start."""
        return self._server.http_port

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

    def stream(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: int = -1,
        request_id: str = "",
        outputs: Sequence[str] = (),
        parameters: dict[str, bool | int | float | str] | None = None,
    ) -> Generator[Result, None, None]:
        """As `Server.stream`; leaving the loop cancels the request. Raises HostError."""
        responses = self._server.stream(
            model,
            inputs,
            version=version,
            request_id=request_id,
            outputs=outputs,
            parameters=parameters,
        )
        try:
            while (result := self._run(_next(responses))) is not None:
                yield result
        finally:
            self._close_stream(responses)

    def _close_stream(self, responses: AsyncGenerator[Result, None]) -> None:
        if threading.current_thread() is self._thread:  # of the garbage collector
            self._loop.create_task(responses.aclose())
            return
        with suppress(HostError):  # a server that has stopped has ended the request
            self._run(_close(responses))

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        """As `Server.load_model`. Raises HostError."""
        self._run(self._server.load_model(name, parameters))

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """As `Server.unload_model`. Raises HostError."""
        self._run(self._server.unload_model(name, unload_dependents))

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

    def __exit__(self, *error: object) -> None:
        self.stop()


async def _next(responses: AsyncGenerator[Result, None]) -> Result | None:
    """Returns the next response; None after the last one."""
    return await anext(responses, None)


async def _close(responses: AsyncGenerator[Result, None]) -> None:
    await responses.aclose()

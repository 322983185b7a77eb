"""The client of a fork server, which starts stubs for the host and reports their ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stub.wire.spawn import SpawnArguments, receive_event, send_request

_START_TIMEOUT = 30.0  # seconds in which a new server has to answer for the first time
_MAX_PENDING_LAUNCHES = 16  # requests without a response; the socket holds many more


@dataclass(frozen=True, slots=True)
class StartedStub:
    """A running stub: its number there, its pidfd, and its future return code.

    The receiver closes the pidfd. The code is as in `subprocess`.
    """

    pid: int
    pidfd: int
    code: asyncio.Future[int]


class ForkClient:
    """The host's end of a fork server, or of a process that acts as one.

    When the other end of `sock` is gone, `on_disconnect` is called, launches fail with
    `disconnect_text`, and the stubs count as killed. `silence_timeout`: seconds in which a server
    that has answered before has to answer again; otherwise `silent` is set, and what waits for it
    fails. Its stubs continue. Source: docs/explanation/decisions/0010 and 0016.
    """

    def __init__(
        self,
        sock: socket.socket,
        disconnect_text: str,
        on_disconnect: Callable[[], None],
        silence_timeout: float | None = None,
    ) -> None:
        self.closed = False
        self.silent = False
        self._socket = sock
        self._disconnect_text = disconnect_text
        self._on_disconnect = on_disconnect
        self._silence_timeout = silence_timeout
        self._messages_received = 0  # number of messages
        self._loop = asyncio.get_running_loop()
        self._prepared: asyncio.Future[str] = self._loop.create_future()
        self._launch_limit = asyncio.Semaphore(_MAX_PENDING_LAUNCHES)
        self._launches: dict[str, asyncio.Future[StartedStub]] = {}
        self._exit_codes: dict[int, asyncio.Future[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    async def wait_prepared(self, seconds: float | None) -> str:
        """Waits until the server has prepared its model; returns the error, "" for none.

        Raises TimeoutError after `seconds`, and ConnectionError if the server ends.
        """
        return await asyncio.wait_for(asyncio.shield(self._prepared), seconds)

    async def start_stub(self, spawn: SpawnArguments, stdout: int, stderr: int) -> StartedStub:
        """Starts a stub with these outputs; all descriptors stay the caller's.

        Raises OSError: ConnectionError if the other end is gone, TimeoutError if it is silent. If
        that is raised, or the launch is cancelled, a stub may start all the same; it ends with the
        lifeline of `spawn`.
        """
        launch: asyncio.Future[StartedStub] = self._loop.create_future()
        async with self._launch_limit:
            if self.closed:
                raise ConnectionError(self._disconnect_text)
            self._launches[spawn.token] = launch
            try:
                send_request(self._socket, spawn, stdout, stderr)
                await self._wait_for_news(launch)
                return launch.result()
            except asyncio.CancelledError:
                if not launch.cancel() and launch.exception() is None:  # it came just now
                    started = launch.result()
                    self._exit_codes.pop(started.pid, None)
                    os.close(started.pidfd)
                raise
            finally:
                self._launches.pop(spawn.token, None)

    def expect_exit(self, pid: int) -> None:
        """Called when the kernel reports the end of a stub, before or after the server does."""
        if pid not in self._exit_codes:
            return
        code = _read_exit_code(pid)
        if code is not None:
            self._exit_codes.pop(pid).set_result(code)
            return
        # The server has reaped it, and is about to tell how it has ended.
        task = self._loop.create_task(self._wait_for_exit_code(pid, self._exit_codes[pid]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_exit_code(self, pid: int, code: asyncio.Future[int]) -> None:
        try:
            await self._wait_for_news(code)
        except TimeoutError:
            self._exit_codes.pop(pid, None)
            code.set_result(-signal.SIGKILL)  # as if the server had died with it

    async def _wait_for_news(self, told: asyncio.Future[Any]) -> None:
        """Waits for an answer, as long as there are messages at all. Raises TimeoutError."""
        silent = 0
        while not told.done():
            heard = self._messages_received
            timeout = self._silence_timeout
            if timeout is not None and not heard:
                timeout = max(timeout, _START_TIMEOUT)
            # In two halves: if this process itself was stopped, the first half is over at once.
            half = None if timeout is None else timeout / 2
            await asyncio.wait([told], timeout=half)
            silent = silent + 1 if self._messages_received == heard else 0
            if silent == 2 and not told.done():
                self.silent = True
                raise TimeoutError(
                    errno.ETIMEDOUT, f"the fork server did not answer for {timeout:g} s"
                )

    def _read(self) -> None:
        try:
            news = receive_event(self._socket)
        except BlockingIOError:
            return
        except OSError:
            news = None
        if news is None:
            self._handle_disconnect()
            return
        self._messages_received += 1
        self.silent = False
        told, descriptors = news
        if "prepared" in told:
            if not self._prepared.done():
                self._prepared.set_result(str(told["prepared"]))
            return
        if "error" in told:
            self._handle_refused(str(told["token"]), told["error"])
            return
        pid = told["pid"]
        assert isinstance(pid, int)
        if "token" in told:
            self._handle_started(str(told["token"]), pid, *descriptors)
            return
        # Nothing waits for a stub whose launch was cancelled, or that had no pidfd.
        ended = self._exit_codes.pop(pid, None)
        if ended is not None:
            code = told["code"]
            assert isinstance(code, int)
            ended.set_result(code)

    def _handle_started(self, token: str, pid: int, pidfd: int | None = None) -> None:
        launch = self._launches.pop(token, None)
        if launch is None or launch.done():  # cancelled; it ends with its lifeline
            if pidfd is not None:
                os.close(pidfd)
        elif pidfd is None:  # this process had no descriptor left
            launch.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        else:
            code = self._exit_codes[pid] = self._loop.create_future()
            launch.set_result(StartedStub(pid, pidfd, code))

    def _handle_refused(self, token: str, error: object) -> None:
        launch = self._launches.pop(token, None)
        if launch is not None and not launch.done():
            assert isinstance(error, int)
            launch.set_exception(OSError(error, os.strerror(error)))

    def _handle_disconnect(self) -> None:
        """Called when the other end is gone, and its stubs with it."""
        self.close()
        self._on_disconnect()
        if not self._prepared.done():
            self._prepared.set_exception(ConnectionError(self._disconnect_text))
            self._prepared.exception()  # nothing may wait for it
        launches, self._launches = self._launches, {}
        for launch in launches.values():
            if not launch.done():
                launch.set_exception(ConnectionError(self._disconnect_text))
        codes, self._exit_codes = self._exit_codes, {}
        for code in codes.values():
            code.set_result(-signal.SIGKILL)

    def close(self) -> None:
        """Closes the connection, which a fork server takes for the host's end."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()
            for task in self._tasks:
                task.cancel()


def _read_exit_code(pid: int) -> int | None:
    """The return code of a process that has ended and was not reaped, None if it was.

    Another process with this number would not be a zombie so soon.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    if fields[0] != b"Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))

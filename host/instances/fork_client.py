"""Stubs that another process starts for the host: asked for, and heard of until they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stub.wire.fork_protocol import receive_news, send_request
from stub.wire.spawn import Spawn

_log = logging.getLogger("pbhost")

_MOST_AT_A_TIME = 16  # requests without an answer; the socket holds many more


@dataclass(frozen=True, slots=True)
class Started:
    """A stub that runs: its number over there, a pidfd, and what gets its return code.

    Whoever is given it closes the pidfd. The code is as subprocess has it.
    """

    pid: int
    pidfd: int
    code: asyncio.Future[int]


class ForkClient:
    """The host's end of a fork server, or of what takes the part of one (decisions 10 and 16).

    When the other end of `sock` is gone, `lost` is called, launches fail with the text `gone`, and
    the stubs count as killed. With `patience`, in seconds, it is given up when it says nothing for
    so long although it should; it is up to `lost` to end it.
    """

    def __init__(
        self,
        sock: socket.socket,
        gone: str,
        lost: Callable[[], None],
        patience: float | None = None,
    ) -> None:
        self.closed = False
        self._socket = sock
        self._gone = gone
        self._lost = lost
        self._patience = patience
        self._heard = 0  # how often
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_MOST_AT_A_TIME)
        self._launches: dict[str, asyncio.Future[Started]] = {}
        self._codes: dict[int, asyncio.Future[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    async def start(self, spawn: Spawn, stdout: int, stderr: int) -> Started:
        """Have a stub started with this output; all descriptors stay the caller's.

        Raises OSError, ConnectionError if the other end is gone. If it is cancelled, a stub may
        start all the same: it ends with the lifeline of `spawn`.
        """
        launch: asyncio.Future[Started] = self._loop.create_future()
        async with self._slots:
            if self.closed:
                raise ConnectionError(self._gone)
            self._launches[spawn.token] = launch
            try:
                send_request(self._socket, spawn, stdout, stderr)
                await self._expect(launch)
                return launch.result()
            except asyncio.CancelledError:
                if not launch.cancel() and launch.exception() is None:  # it came just now
                    started = launch.result()
                    self._codes.pop(started.pid, None)
                    os.close(started.pidfd)
                raise
            finally:
                self._launches.pop(spawn.token, None)

    def expect_end(self, pid: int) -> None:
        """The kernel has told of the end of a stub: the other end has to say how it ended."""
        if pid in self._codes:
            task = self._loop.create_task(self._expect(self._codes[pid]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _expect(self, told: asyncio.Future[Any]) -> None:
        """Wait for news of something as long as there are news at all."""
        silent = 0
        while not told.done():
            heard = self._heard
            # In two halves: if this process itself has stood still, the first one is over at once.
            half = None if self._patience is None else self._patience / 2
            await asyncio.wait([told], timeout=half)
            silent = silent + 1 if self._heard == heard else 0
            if silent == 2 and not self.closed:
                self._give_up()

    def _give_up(self) -> None:
        self._gone = f"the fork server has said nothing for {self._patience:g} s"
        _log.error("%s: it is ended, and with it its stubs", self._gone)
        self._end()

    def _read(self) -> None:
        try:
            news = receive_news(self._socket)
        except BlockingIOError:
            return
        except OSError:
            news = None
        if news is None:
            self._end()
            return
        self._heard += 1
        told, descriptors = news
        pid = told["pid"]
        assert isinstance(pid, int)
        if "token" in told:
            self._started(str(told["token"]), pid, *descriptors)
            return
        # Nobody waits for the end of a stub whose launch was cancelled, or that had no pidfd.
        ended = self._codes.pop(pid, None)
        if ended is not None:
            code = told["code"]
            assert isinstance(code, int)
            ended.set_result(code)

    def _started(self, token: str, pid: int, pidfd: int | None = None) -> None:
        launch = self._launches.pop(token, None)
        if launch is None or launch.done():  # cancelled; it ends with its lifeline
            if pidfd is not None:
                os.close(pidfd)
        elif pidfd is None:  # there was no room for one more in this process
            launch.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        else:
            code = self._codes[pid] = self._loop.create_future()
            launch.set_result(Started(pid, pidfd, code))

    def _end(self) -> None:
        """The other end is gone, and its stubs with it."""
        self.close()
        self._lost()
        launches, self._launches = self._launches, {}
        for launch in launches.values():
            if not launch.done():
                launch.set_exception(ConnectionError(self._gone))
        codes, self._codes = self._codes, {}
        for code in codes.values():
            code.set_result(-signal.SIGKILL)

    def close(self) -> None:
        """Hear nothing more, which a fork server takes for the host's end."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()
            for task in self._tasks:
                task.cancel()

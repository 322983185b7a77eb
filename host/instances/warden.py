"""The process that ends what models have started and left behind, also when the host is killed."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import stub.wire

_log = logging.getLogger("pbhost")

_EXIT_SECONDS = 5.0  # that is several times as long as what it ends may take
_ENTRY = str(Path(stub.wire.__file__).parents[1] / "warden.py")


class Warden:
    """Told of each stub that leads a process group. It is started with the first one.

    Should it die, another one takes its place with the next news.
    """

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._socket: socket.socket | None = None
        self._pid = 0

    def watch(self, group: int) -> None:
        """A stub runs."""
        self._groups.add(group)
        self._tell(b"+", group)

    def end(self, group: int) -> None:
        """The stub has ended, and what is left of its group is to end too."""
        self._groups.discard(group)
        self._tell(b"-", group)

    def _tell(self, what: bytes, group: int) -> None:
        news = b"%b%d" % (what, group)
        if self._socket is not None:
            try:
                self._socket.send(news)
                return
            except OSError:  # somebody has killed it, or stopped it
                self._let_go()
        try:
            self._start()
            assert self._socket is not None
            for each in (*(b"+%d" % known for known in self._groups), news):
                self._socket.send(each)
        except OSError as error:
            _log.warning("nobody ends what models leave behind: %s", error.strerror or error)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = theirs.fileno()
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-IS", _ENTRY, str(fd), str(os.getpid())],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                    (os.POSIX_SPAWN_DUP2, 0, 1),
                    (os.POSIX_SPAWN_DUP2, 0, 2),
                    (os.POSIX_SPAWN_DUP2, fd, fd),  # onto itself: that lets the child inherit it
                ],
                setsid=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours

    def _let_go(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
            with suppress(ProcessLookupError, ChildProcessError):  # a program around us may reap it
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)

    async def close(self) -> None:
        """All stubs have ended; return when nothing is left of their groups."""
        sock, self._socket = self._socket, None
        if sock is not None:
            with suppress(OSError):  # it has been killed
                sock.shutdown(socket.SHUT_RDWR)  # a fork of a program around us may have it as well
            sock.close()
            await asyncio.to_thread(_reap, self._pid)


def _reap(pid: int) -> None:
    """Wait for its end, or end it if it does not come to it. A program around us may reap it."""
    with suppress(ProcessLookupError, ChildProcessError):
        pidfd = os.pidfd_open(pid)
        try:
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            if not waiting.poll(_EXIT_SECONDS * 1000):
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
        os.waitpid(pid, 0)

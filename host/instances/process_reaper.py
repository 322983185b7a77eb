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
_LIVES = 3  # of wardens that are started one after the other without news
_LONGEST = 32  # bytes of an answer: the number of a group
_ENTRY = str(Path(stub.wire.__file__).parents[1] / "process_reaper.py")


class Warden:
    """Told of each stub that leads a process group. It is started with the first one.

    Should it die, another one takes its place. That one is told again of the ends that were not
    confirmed: what is sent to a process that is about to die is lost without an error.
    """

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._ended: set[int] = set()  # those of which something may be left
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._lives = 0

    def watch(self, group: int) -> None:
        """A stub runs. Called on the event loop, as `end` is."""
        self._groups.add(group)
        self._ended.discard(group)
        self._news(b"+%d" % group)

    def end(self, group: int) -> None:
        """The stub has ended, and what is left of its group is to end too."""
        self._groups.discard(group)
        self._ended.add(group)
        self._news(b"-%d" % group)

    def _news(self, news: bytes) -> None:
        self._lives = 0
        if self._socket is not None:
            try:
                self._socket.send(news)
                return
            except OSError:  # somebody has killed it, or stopped it
                self._let_go()
        self._replace()

    def _replace(self) -> None:
        """Start one, unless too many have died, and tell it all."""
        reason = "processes that are to do it end at once"
        while self._socket is None and self._lives < _LIVES:
            self._lives += 1
            try:
                self._start()
                self._tell_all()
            except OSError as error:
                self._let_go()
                reason = error.strerror or str(error)
        if self._socket is None:
            _log.warning("nobody ends what models leave behind: %s", reason)

    def _tell_all(self) -> None:
        assert self._socket is not None
        known = [b"+%d" % group for group in self._groups]
        known += [b"-%d" % group for group in self._ended]
        self._socket.send(b" ".join(known))  # as one: many messages might not fit before it reads

    def _hear(self) -> None:
        """Take which groups have nothing left in them, or that the warden is dead."""
        assert self._socket is not None
        try:
            while group := self._socket.recv(_LONGEST):
                self._ended.discard(int(group))
        except BlockingIOError:
            return
        except ConnectionError:  # it had not read everything
            pass
        self._let_go()
        self._replace()

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
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._hear)

    def _let_go(self) -> None:
        if self._forget():
            with suppress(ProcessLookupError, ChildProcessError):  # a program around us may reap it
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)

    def _forget(self) -> bool:
        """Close what leads to it, if there is one."""
        sock, self._socket = self._socket, None
        if sock is None:
            return False
        assert self._loop is not None
        self._loop.remove_reader(sock)
        with suppress(OSError):  # it has been killed
            sock.shutdown(socket.SHUT_RDWR)  # a fork of a program around us may have it as well
        sock.close()
        return True

    async def close(self) -> None:
        """All stubs have ended; return when nothing is left of their groups."""
        self._lives = 0
        while self._forget() and not await asyncio.to_thread(_reap, self._pid):
            self._replace()


def _reap(pid: int) -> bool:
    """Wait for its end, or end it if it does not come to it; whether it has done all.

    A program around us may reap it: then nobody knows.
    """
    try:
        pidfd = os.pidfd_open(pid)
        try:
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            if not waiting.poll(_EXIT_SECONDS * 1000):
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
        _, status = os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return True
    return status == 0

"""The process reaper: kills what models leave behind, even if the host is killed."""

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

_EXIT_TIMEOUT = 5.0  # several times as long as it may take to kill what is left
_MAX_ATTEMPTS = 3  # process reapers started in a row without a message from them
_MAX_CONFIRMATION = 32  # bytes of a confirmation: the number of a group
_ENTRY = str(Path(stub.wire.__file__).parents[1] / "process_reaper.py")


class ProcessReaper:
    """Tells the process reaper of each stub that leads a process group; starts it with the first.

    If it dies, another one is started and told again of the ends that were not confirmed: what is
    sent to a dying process is lost without an error.
    """

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._unconfirmed: set[int] = set()  # groups that may have processes left
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._pidfd: int | None = None
        self._attempts = 0

    def watch_group(self, group: int) -> None:
        """Watches the process group of a stub. Called on the event loop, like `kill_group`."""
        self._groups.add(group)
        self._unconfirmed.discard(group)
        self._send(b"+%d" % group)

    def kill_group(self, group: int) -> None:
        """Kills what is left of the group of a stub that has ended."""
        self._groups.discard(group)
        self._unconfirmed.add(group)
        self._send(b"-%d" % group)

    def _send(self, news: bytes) -> None:
        self._attempts = 0
        if self._socket is not None:
            try:
                self._socket.send(news)
                return
            except OSError:  # it was killed or stopped
                self._kill_reaper()
        self._ensure_running()

    def _ensure_running(self) -> None:
        """Starts a process reaper, unless too many have died, and sends it everything."""
        reason = "processes that are to do it end at once"
        while self._socket is None and self._attempts < _MAX_ATTEMPTS:
            self._attempts += 1
            try:
                self._start()
                self._send_all_groups()
            except OSError as error:
                self._kill_reaper()
                reason = error.strerror or str(error)
        if self._socket is None:
            _log.warning(
                "process reaper unavailable; orphaned child processes will not be killed: %s",
                reason,
            )

    def _send_all_groups(self) -> None:
        assert self._socket is not None
        known = [b"+%d" % group for group in self._groups]
        known += [b"-%d" % group for group in self._unconfirmed]
        # One message, as many might not fit before it reads them.
        self._socket.send(b" ".join(known))

    def _read_confirmations(self) -> None:
        """Reads which groups are empty, or that the process reaper is dead."""
        assert self._socket is not None
        try:
            while group := self._socket.recv(_MAX_CONFIRMATION):
                self._unconfirmed.discard(int(group))
        except BlockingIOError:
            return
        except ConnectionError:  # it had not read everything
            pass
        self._kill_reaper()
        self._ensure_running()

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
        self._loop.add_reader(ours, self._read_confirmations)
        # Now, as there may be no free descriptor when the server ends.
        self._pidfd = os.pidfd_open(self._pid)

    def _kill_reaper(self) -> None:
        if self._disconnect():
            # An embedding program may have reaped it.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _disconnect(self) -> bool:
        """Closes the connection, if there is one."""
        sock, self._socket = self._socket, None
        if sock is None:
            return False
        assert self._loop is not None
        self._loop.remove_reader(sock)
        with suppress(OSError):  # it was killed
            sock.shutdown(socket.SHUT_RDWR)  # a fork of an embedding program may have it as well
        sock.close()
        return True

    async def close(self) -> None:
        """Waits until nothing is left of the groups, after all stubs have ended."""
        self._attempts = 0
        while self._disconnect():
            assert self._pidfd is not None
            ended_well = await asyncio.to_thread(_wait_for_exit, self._pid, self._pidfd)
            self._close_pidfd()
            if ended_well:
                return
            self._ensure_running()


def _wait_for_exit(pid: int, pidfd: int) -> bool:
    """Waits for its end, or kills it; returns whether it ended well.

    Unknown if an embedding program has reaped it.
    """
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # it may stand still
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        if not waiting.poll(_EXIT_TIMEOUT * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return True
    return status == 0

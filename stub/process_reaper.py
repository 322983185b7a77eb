"""The process reaper: a process that kills what models leave in the process groups of their stubs.

Each stub leads a process group. The host sends the numbers of these groups, and of those whose stub
has ended; when the host is gone, all have. The reaper is a process of its own, as the host may be
killed and all its stubs with it. It is started by path and imports none of our modules, to be
small. It confirms each end once the group is empty; if it is killed before that, the host sends the
number to the next reaper.

All processes of a group get SIGTERM, and SIGKILL one second later. The resource tracker of
`multiprocessing` ignores SIGTERM, as it removes shared memory once the others have gone; it gets
more time for that.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Dict, Iterable, Set

_TERM_GRACE_SECONDS = 1.0  # between SIGTERM and SIGKILL
_TRACKER_GRACE_SECONDS = 3.0  # for the resource tracker after that
_POLL_SECONDS = 0.02  # between two checks whether a group is empty
_MAX_MESSAGE_BYTES = 1 << 20
"""A message names groups, each as `+` or `-` and its number, separated by spaces."""


class ProcessReaper:
    """Serves the host at the other end of `sock`; `host` is a pidfd of it."""

    def __init__(self, sock: socket.socket, host: int) -> None:
        self._socket = sock
        self._host = host
        self._groups: Set[int] = set()  # of stubs that run
        self._terminating: Dict[int, float] = {}  # when their processes get SIGKILL
        self._killed: Set[int] = set()  # groups that may have only the resource tracker left

    def run(self) -> None:
        """Returns when the host has ended and the groups of its stubs are empty."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        waiting.register(self._host, select.POLLIN)
        open_ended = True
        while open_ended:
            ready = [
                fd for fd, _ in waiting.poll(_POLL_SECONDS * 1000 if self._terminating else None)
            ]
            # Its last messages may be unread when it has ended, and its forks may have the socket.
            open_ended = self._receive_groups() and self._host not in ready
            self._poll_terminating_groups()
        self._terminate_groups(self._groups)
        while self._terminating:
            time.sleep(_POLL_SECONDS)
            self._poll_terminating_groups()

    def _receive_groups(self) -> bool:
        """Receives the messages that have arrived; returns False at the end of the connection."""
        while True:
            try:
                message = self._socket.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # it left confirmations unread; the kernel reports that once, before data
            if not message:
                return False
            for each in message.split():
                self._handle_message(each[:1] == b"+", int(each[1:]))

    def _handle_message(self, started: bool, group: int) -> None:
        if started:
            self._groups.add(group)
            return
        self._groups.discard(group)
        self._terminate_groups([group])
        if group not in self._terminating:
            self._confirm_group_ended(group)

    def _terminate_groups(self, groups: Iterable[int]) -> None:
        for group in groups:
            if _signal_group(group, signal.SIGTERM):
                self._terminating[group] = time.monotonic() + _TERM_GRACE_SECONDS

    def _poll_terminating_groups(self) -> None:
        for group, end in list(self._terminating.items()):
            if _signal_group(group, 0):
                if time.monotonic() <= end:
                    continue
                if group not in self._killed and _kill_all_but_tracker(group):
                    self._killed.add(group)
                    self._terminating[group] = time.monotonic() + _TRACKER_GRACE_SECONDS
                    continue
                _signal_group(group, signal.SIGKILL)
            self._killed.discard(group)
            del self._terminating[group]
            self._confirm_group_ended(group)

    def _confirm_group_ended(self, group: int) -> None:
        with suppress(OSError):  # the host has ended, or its buffer is full
            self._socket.send(b"%d" % group, socket.MSG_DONTWAIT)


def _kill_all_but_tracker(group: int) -> bool:
    """Kills the processes of a group one by one; returns whether a resource tracker is left."""
    tracker = False
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            if os.getpgid(int(name)) != group:
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                is_tracker = b"multiprocessing.resource_tracker" in file.read()
            if is_tracker:
                tracker = True
            else:
                os.kill(int(name), signal.SIGKILL)
    return tracker


def _signal_group(group: int, number: int) -> bool:
    """Signals a group; returns False if it is empty.

    The kernel does not reuse the number while the group has processes.
    """
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # only processes of other users are left
    return True


def main() -> None:
    """Runs the reaper for the stubs of the parent process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    # Closes inherited descriptors. They are listed, because closing every number up to a limit of
    # a billion takes some Pythons a minute.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != descriptor:
            with suppress(OSError):  # the descriptor that listed them
                os.close(int(name))
    host = -1
    with suppress(ProcessLookupError):
        host = os.pidfd_open(parent)
    if host < 0 or os.getppid() != parent:
        return  # the host was killed before it had stubs
    ProcessReaper(socket.socket(fileno=descriptor), host).run()


if __name__ == "__main__":
    main()

"""A process that ends what stubs leave behind: the children of models, in their stubs' groups.

Each stub leads a process group. The host says which ones there are, and which have ended; when the
host is gone, all have. It is a process of its own because the host may be killed, and with it all
its stubs. It is started by path and imports nothing of ours, so that it is small. Each end that it
was told of is confirmed once nothing is left of the group: should it be killed before that, the
host tells the next one.

What such a group has in it gets SIGTERM first: the resource tracker of `multiprocessing` ignores
that, and has shared memory to remove once the others have gone.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Dict, Iterable, Set

_GRACE = 1.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.02  # seconds between two looks whether anything is left
_LONGEST = 1 << 20  # bytes of a message: each group is `+` or `-` and its number, then a space


class Warden:
    """Serves the host at the other end of `sock`; `host` is a pidfd of it."""

    def __init__(self, sock: socket.socket, host: int) -> None:
        self._socket = sock
        self._host = host
        self._groups: Set[int] = set()  # of stubs that run
        self._ending: Dict[int, float] = {}  # when what is left in them is killed

    def run(self) -> None:
        """Return when the host is gone, and nothing is left of its stubs' groups."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        waiting.register(self._host, select.POLLIN)
        open_ended = True
        while open_ended:
            ready = [fd for fd, _ in waiting.poll(_POLL * 1000 if self._ending else None)]
            if self._socket.fileno() in ready:
                open_ended = self._hear()
            open_ended = open_ended and self._host not in ready  # its forks may have the socket
            self._look()
        self._end(self._groups)
        while self._ending:
            time.sleep(_POLL)
            self._look()

    def _hear(self) -> bool:
        """Take what the host says; whether it may say more."""
        try:
            news = self._socket.recv(_LONGEST)
        except ConnectionError:
            return False
        if not news:
            return False
        for each in news.split():
            group = int(each[1:])
            if each[:1] == b"+":
                self._groups.add(group)
            else:
                self._groups.discard(group)
                self._end([group])
                if group not in self._ending:
                    self._confirm(group)
        return True

    def _end(self, groups: Iterable[int]) -> None:
        for group in groups:
            if _send(group, signal.SIGTERM):
                self._ending[group] = time.monotonic() + _GRACE

    def _look(self) -> None:
        for group, end in list(self._ending.items()):
            if _send(group, 0):
                if time.monotonic() <= end:
                    continue
                _send(group, signal.SIGKILL)
            del self._ending[group]
            self._confirm(group)

    def _confirm(self, group: int) -> None:
        with suppress(OSError):  # the host is gone, or stands still with a full buffer
            self._socket.send(b"%d" % group, socket.MSG_DONTWAIT)


def _send(group: int, number: int) -> bool:
    """Whether there was anybody to get it. No number is given anew while a group has it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # only programs of other users are left, and those are not ours to end
    return True


def main() -> None:
    """Watch over the stubs of this process's parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    # What the host has inherited and passes on is not kept open. A range up to the limit of
    # descriptors, which may be a billion, would take some Pythons a minute.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != descriptor:
            with suppress(OSError):  # the one that has listed them
                os.close(int(name))
    host = -1
    with suppress(ProcessLookupError):
        host = os.pidfd_open(parent)
    if host < 0 or os.getppid() != parent:
        return  # it was killed before it could have stubs
    Warden(socket.socket(fileno=descriptor), host).run()


if __name__ == "__main__":
    main()

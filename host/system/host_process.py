"""The process of the host: its standard streams, and the duties of PID 1.

The kernel makes PID 1 the parent of every process whose own parent has ended, and PID 1 has to wait
for them, or they stay as zombies (pid_namespaces(7)). The server cannot do that itself: waiting for
any child would take the exit status of its own children from the code that waits for them.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def open_standard_streams() -> None:
    """Opens the null device for each standard stream that is closed, as daemons do.

    Otherwise the next files and sockets would get these numbers and be taken for the console. Call
    this before any other file is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python sets it to None if it was closed
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r"))


_INIT_PID = 1
_NOT_FORWARDED = {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU}


def fork_from_init() -> None:
    """Continues in a child process if this process is PID 1; otherwise does nothing.

    PID 1 stays behind as the child's parent. It exits with the child's status, or with 128 plus the
    number of the signal that ended the child. Call this while the process has one thread.
    """
    if os.getpid() != _INIT_PID:
        return
    blocked = signal.valid_signals() - _NOT_FORWARDED | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked | {signal.SIGTTOU})
    child = os.fork()
    if child == 0:
        _lead_foreground_group()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os._exit(_run_until_exit(child, blocked))


def _lead_foreground_group() -> None:
    """Makes the calling process lead a process group, that of the terminal if there is one.

    So Ctrl-C reaches the server once: PID 1, which would forward it, is in another group.
    """
    os.setpgid(0, 0)
    with suppress(OSError):  # the input is no terminal
        os.tcsetpgrp(0, os.getpgrp())


def _run_until_exit(child: int, signals: set[signal.Signals]) -> int:
    """Reaps processes and forwards signals until the child has ended; returns its status."""
    while True:
        received = signal.sigwait(signals)
        if received is signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                return status
        else:
            os.kill(child, received)  # it exists, at least as a zombie


def _reap(child: int) -> int | None:
    """Waits for all processes that have ended; returns the child's status if it is one of them."""
    ended = None
    with suppress(ChildProcessError):  # none is left
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                ended = code if code >= 0 else 128 - code
    return ended

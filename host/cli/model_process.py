"""The process of the model of `pbhost run`: its start at this terminal, its signals, its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from host.instances.process import describe_exit

_EXIT_FAILED = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_HANDLED = (signal.SIGINT, *_PASSED_ON)


def run_and_wait(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs the process of the model; returns its exit status, or a signal's number below 0.

    Call it on the main thread. SIGTERM and SIGHUP are passed on. SIGINT has no effect here: a
    terminal sends it to the model too. Says so if the model, or a signal, has ended the process.
    """
    done, child_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with open(done, "rb", buffering=0) as completion:
        os.set_inheritable(child_end, True)
        # A signal between the start and the handlers would end this process, and so the model.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            arguments = [*command, str(child_end)]
            pid = os.posix_spawn(command[0], arguments, variables, setsigmask=mask)
            with _passing_signals_to(pid, mask):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a signal still finds the pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(child_end)
        _, status = os.waitpid(pid, 0)
        completed = bool(completion.read(1))
    code = os.waitstatus_to_exitcode(status)
    if not completed or (code < 0 and code != -signal.SIGINT):
        when = "after" if completed else "before"
        sys.stderr.write(
            f"pbhost run: the process of the model {describe_exit(code)} {when} the run was over\n"
        )
    return code if completed else code or _EXIT_FAILED


@contextmanager
def _passing_signals_to(pid: int, mask: set[int]) -> Iterator[None]:
    """Handles the signals, apart from those that are ignored, and sets the mask."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number in _PASSED_ON:
            os.kill(pid, number)

    previous = {number: signal.getsignal(number) for number in _HANDLED}
    handled = [number for number in _HANDLED if previous[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def exit_as(code: int) -> NoReturn:
    """Ends this process as the model's ended, with 128 and the number for a signal.

    It dies of SIGINT, because a shell ends a loop or a script only for a command that did so.
    """
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(code if code >= 0 else 128 - code)

"""Sets up a stub process: signals, standard streams, process title, parent-death signal."""

import ctypes
import faulthandler
import io
import os
import signal
import sys
import threading

from stub.wire.heap import tune_malloc

_OOM_SCORE = 100  # counts as much as a tenth of the memory that is allowed
_MAX_FREED_HEAP_BYTES = 256 << 20  # bytes of freed memory


def set_title(name: str, role: str = "pbhost-stub") -> None:
    """Shows `pbhost-stub <name>` in ps and top.

    Without setproctitle in the execution environment, only `ps -o comm` shows the role.
    """
    try:
        import setproctitle
    except ImportError:
        if sys.platform == "linux":
            pr_set_name = 15
            ctypes.CDLL(None).prctl(pr_set_name, role.encode(), 0, 0, 0)
        return
    setproctitle.setproctitle(f"{role} {name}".rstrip())


def lead_process_group() -> None:
    """Makes this process the leader of a process group: Ctrl-C at a terminal is for the host alone.

    It stays in the host's session, as Linux may share the CPU time between sessions
    (docs/explanation/decisions/0031). In the background of a terminal, reading from it is an error,
    and does not stop the process.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)


def set_up_stub_process(title: str) -> None:
    """Sets up the process as models expect it (docs/reference/model-api.md, "What an instance
    process inherits").
    """
    ignore_stop_signals()
    kill_with_parent()
    prefer_as_oom_victim()
    tune_malloc(_MAX_FREED_HEAP_BYTES)
    set_title(title)
    # A crash in native code writes the Python stacks to the host's log, and to its record.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` shows what every thread is doing
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.argv[:] = [""]


def ignore_stop_signals() -> None:
    """Makes SIGINT and SIGTERM have no effect: a stub stops when its host says so.

    An empty handler does this, because child processes would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(
        before=_block_sigterm, after_in_parent=_restore_mask, after_in_child=_restore_signals
    )


_fork = threading.local()


def _block_sigterm() -> None:
    """Keeps SIGTERM pending, so that a child gets it that is ended right after its fork.

    `multiprocessing.Pool` does that. Python forgets signals that arrived before it was set up in
    the child.
    """
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _restore_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_mask()


def prefer_as_oom_victim() -> None:
    """Makes the kernel end this process rather than the host if there is no memory left."""
    path = "/proc/self/oom_score_adj"
    try:
        with open(path) as file:
            adjustment = int(file.read())
        with open(path, "w") as file:
            file.write(str(min(adjustment + _OOM_SCORE, 1000)))
    except OSError:
        pass  # the kernel decides by size alone


def kill_with_parent() -> None:
    """Makes the kernel kill this process when the host's spawning thread ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)

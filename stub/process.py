"""The stub as an operating-system process: its signals, its streams, its name, its parent."""

import ctypes
import faulthandler
import io
import os
import signal
import sys

from stub.wire.heap import tune_malloc

_MAX_FREED_HEAP_BYTES = 256 << 20  # bytes of freed memory


def set_title(name: str, role: str = "pbhost-stub") -> None:
    """Show `pbhost-stub <name>` in ps and top.

    An execution environment need not have setproctitle; then only what `ps -o comm` shows is set.
    """
    try:
        import setproctitle
    except ImportError:
        if sys.platform == "linux":
            pr_set_name = 15
            ctypes.CDLL(None).prctl(pr_set_name, role.encode(), 0, 0, 0)
        return
    setproctitle.setproctitle(f"{role} {name}".rstrip())


def set_up_stub_process(title: str) -> None:
    """Make this process what a model may rely on (pb_utils spec 1.2)."""
    ignore_stop_signals()
    kill_with_parent()
    tune_malloc(_MAX_FREED_HEAP_BYTES)
    set_title(title)
    # A crash in native code leaves a Python stack in the host's log; that of the thread is enough.
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` shows what every thread is doing
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.argv[:] = [""]


def ignore_stop_signals() -> None:
    """Let SIGINT and SIGTERM pass: a stub ends when its host says so.

    They are handled, not ignored, for what the model starts would inherit that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_restore_default_signals)


def _restore_default_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def kill_with_parent() -> None:
    """Have the kernel kill this process when the host's spawning thread ends, on Linux."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)

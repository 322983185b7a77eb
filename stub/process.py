"""Sets up a stub process: signals, standard streams, process title, parent-death signal, CPUs."""

import ctypes
import faulthandler
import io
import os
import platform
import signal
import sys
import threading
import traceback
from typing import List, Optional, Sequence

from stub.wire.heap import tune_malloc

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The numbers of the system call set_mempolicy, for which the C library has no function."""

_MPOL_BIND = 2


class BindingError(Exception):
    """The machine lacks CPUs or a NUMA node of the host policy; the text names them."""


def bind_process(cores: Sequence[int], node: Optional[int]) -> str:
    """Binds all threads to these CPUs, if any, and the memory of this thread to this node.

    Threads and processes that this thread starts later inherit both. Returns a warning if the
    system does not allow the memory binding, else "". Raises BindingError.
    """
    if cores:
        _bind_threads(cores)
    return "" if node is None else _bind_memory(node)


def _bind_threads(cores: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # none of the CPUs is available
        missing = set(cores)
    else:
        missing = set(cores) - os.sched_getaffinity(0)
    if missing:
        numbers = ", ".join(map(str, sorted(missing)))
        raise BindingError(f"'cpu-cores' names CPUs that it cannot use: {numbers}")
    for thread in map(int, os.listdir("/proc/self/task")):  # libraries may have started threads
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            pass  # the thread has just ended


def _bind_memory(node: int) -> str:
    if not os.path.isdir(f"/sys/devices/system/node/node{node}"):
        raise BindingError(f"'numa-node' names node {node}, which does not exist")
    number = _SET_MEMPOLICY.get(platform.machine())
    error = f"not supported on {platform.machine()}"
    if number is not None:
        word = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (node // word + 1))()
        mask[node // word] = 1 << node % word
        library = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_ulong(word * len(mask) + 1)  # the kernel subtracts one
        if library.syscall(number, _MPOL_BIND, mask, size) == 0:
            return ""
        error = os.strerror(ctypes.get_errno())
    # Containers often forbid the call. The instance works without it, only slower.
    return f"memory is not bound to NUMA node {node}: {error}"


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
    """Sets up the process as models expect it (docs/reference/model-processes.md, "What an instance
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


_MAX_FRAMES = 50  # of each thread, the innermost ones
_MAX_LINES = 2000
_LINE_LENGTH = 500


def describe_stacks() -> List[str]:
    """Returns lines with the Python stacks of all threads but the calling one, innermost last.

    The main thread, which runs `execute`, is the first one.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, main = threading.get_ident(), threading.main_thread().ident
    frames = sys._current_frames()
    lines: List[str] = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        if ident == own:
            continue
        stack = traceback.StackSummary.extract(traceback.walk_stack(frames[ident]))
        stack.reverse()
        lines.append(f"thread {names.get(ident, ident)}:")
        if len(stack) > _MAX_FRAMES:
            lines.append(f"  ... {len(stack) - _MAX_FRAMES} frames")
        for text in traceback.format_list(stack[-_MAX_FRAMES:]):
            lines += text.rstrip("\n").split("\n")
    return [line[:_LINE_LENGTH] for line in lines[:_MAX_LINES]]

"""Binds this process to the CPUs and the NUMA node of the instance's host policy."""

import ctypes
import os
import platform
from typing import Optional, Sequence

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

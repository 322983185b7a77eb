"""Which CPUs and which NUMA node this process uses, as the host's policy says."""

import ctypes
import os
import platform
from typing import Optional, Sequence

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The numbers of the system call, for which the C library has no function."""

_MPOL_BIND = 2


class BindingError(Exception):
    """This machine does not have what the policy asks for. `str()` says what."""


def bind_process(cores: Sequence[int], node: Optional[int]) -> str:
    """Have all threads run on these CPUs, if there are any, and this one take memory of that node.

    Threads and processes that this thread starts later do the same. What the system does not allow
    is returned as a warning. Raises BindingError.
    """
    if cores:
        _bind_threads(cores)
    return "" if node is None else _bind_memory(node)


def _bind_threads(cores: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # none of them is there
        missing = set(cores)
    else:
        missing = set(cores) - os.sched_getaffinity(0)
    if missing:
        numbers = ", ".join(map(str, sorted(missing)))
        raise BindingError(f"'cpu-cores' names CPUs that it cannot use: {numbers}")
    for thread in map(int, os.listdir("/proc/self/task")):  # libraries may have started some
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            pass  # it has just ended


def _bind_memory(node: int) -> str:
    if not os.path.isdir(f"/sys/devices/system/node/node{node}"):
        raise BindingError(f"'numa-node' names node {node}, which is not there")
    number = _SET_MEMPOLICY.get(platform.machine())
    error = f"it is not known how on {platform.machine()}"
    if number is not None:
        word = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (node // word + 1))()
        mask[node // word] = 1 << node % word
        library = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_ulong(word * len(mask) + 1)  # the kernel takes one off
        if library.syscall(number, _MPOL_BIND, mask, size) == 0:
            return ""
        error = os.strerror(ctypes.get_errno())
    # Containers often forbid it. The instance does its work all the same, only slower.
    return f"memory is not bound to NUMA node {node}: {error}"

"""Copies of large memory, or what a stub has in their place.

Two threads copy: one core alone does not use what the memory can give.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_MIN_THREADED_BYTES = 1 << 20  # bytes; below, waking a thread takes as long as it saves
_MIN_MAPPED_BYTES = 1 << 18  # bytes; below, a copy takes no longer
_CALLER_SHARE = (
    0.55  # of the bytes: the helper begins later. More parts would cost more turns of the GIL.
)
_PAGE = 4096


def _always() -> bool:
    return True


_core_is_free: Callable[[], bool] = _always


def set_core_is_free(is_free: Callable[[], bool]) -> None:
    """Say who tells whether a core is free for a second thread, as far as one can know."""
    global _core_is_free
    _core_is_free = is_free


def _map_nothing(owner: object, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    return None


_map_copy_on_write: Callable[[object, npt.NDArray[Any]], npt.NDArray[Any] | None] = _map_nothing


def set_copy_on_write_mapper(
    show: Callable[[object, npt.NDArray[Any]], npt.NDArray[Any] | None],
) -> None:
    """Say who may have something better than a copy of a large array in memory of ``owner``: a
    writable array with the same content that is as private, or else None.
    """
    global _map_copy_on_write
    _map_copy_on_write = show


def copy_from_shared_memory(array: npt.NDArray[Any], owner: object) -> npt.NDArray[Any]:
    """Return a writable array of the same content that nobody else reads or writes."""
    shown = _map_copy_on_write(owner, array) if array.nbytes >= _MIN_MAPPED_BYTES else None
    return copy_array(array) if shown is None else shown


def copy_array(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a C-contiguous array of any shape and of any dtype but object."""
    made: npt.NDArray[Any]
    if array.nbytes < _MIN_THREADED_BYTES or not _core_is_free():
        made = array.copy()
        return made
    made = np.empty_like(array)
    _copy_with_two_threads(made.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8))
    return made


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy bytes to memory of the same size; both of format ``B`` and one dimension.

    Raises ValueError if the sizes differ.
    """
    if source.nbytes < _MIN_THREADED_BYTES or source.nbytes != target.nbytes or not _core_is_free():
        target[:] = source
    else:
        _copy_with_two_threads(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _CopyTask:
    """A part of a copy, for whoever comes first; the helper holds `running` meanwhile."""

    __slots__ = ("_pending", "running")

    def __init__(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        self.running = threading.Lock()
        self._pending = [(target, source)]

    def run(self) -> None:
        """Copy it, unless somebody else has taken it. numpy lets other threads run meanwhile."""
        try:
            part = self._pending.pop()
        except IndexError:
            return
        np.copyto(*part)


class _CopyThread:
    """A thread that takes a share of each copy. If it comes late, nothing is left to do."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_CopyTask] = SimpleQueue()
        threading.Thread(target=self._run, name="pb_utils-copy", daemon=True).start()

    def _run(self) -> None:
        while True:
            share = self.queue.get()
            with share.running:
                share.run()


_copy_thread: _CopyThread | None = None
_start_lock = threading.Lock()


def _copy_with_two_threads(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    global _copy_thread
    if _copy_thread is None:
        with _start_lock:
            if _copy_thread is None:
                _copy_thread = _CopyThread()
    cut = int(_CALLER_SHARE * len(target)) // _PAGE * _PAGE
    share = _CopyTask(target[cut:], source[cut:])
    _copy_thread.queue.put(share)
    np.copyto(target[:cut], source[:cut])
    share.run()
    with share.running:
        pass  # what the helper has begun is done


def _reset_after_fork() -> None:
    """A forked child has no helper; the lock may have been held by a thread that it has not."""
    global _copy_thread, _start_lock
    _copy_thread, _start_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)

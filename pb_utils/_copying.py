"""Copies of large arrays, by two threads or as copy-on-write mappings.

One core alone does not use the whole memory bandwidth, so a second thread helps if a core is free.
In a stub, a copy-on-write mapping can replace the copy of an array in shared memory.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_MIN_THREADED_BYTES = 1 << 20  # below 1 MiB, waking the helper thread takes as long as it saves
_MIN_MAPPED_BYTES = 1 << 18  # below 256 KiB, a copy is as fast as a mapping
_CALLER_SHARE = 0.55  # of the bytes; the helper starts later, so it gets less
_PAGE = 4096


def _assume_free() -> bool:
    return True


_core_is_free: Callable[[], bool] = _assume_free


def set_core_is_free(is_free: Callable[[], bool]) -> None:
    """Sets the function that tells whether a core is free for the helper thread."""
    global _core_is_free
    _core_is_free = is_free


def _no_mapping(owner: object, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    return None


_map_copy_on_write: Callable[[object, npt.NDArray[Any]], npt.NDArray[Any] | None] = _no_mapping


def set_copy_on_write_mapper(
    mapper: Callable[[object, npt.NDArray[Any]], npt.NDArray[Any] | None],
) -> None:
    """Sets the function that can map an array copy-on-write instead of a copy.

    Args:
        mapper: called with the owner of the memory and an array in it. It returns a private,
            writable array with the same content, or None if it cannot map the array.
    """
    global _map_copy_on_write
    _map_copy_on_write = mapper


def copy_from_shared_memory(array: npt.NDArray[Any], owner: object) -> npt.NDArray[Any]:
    """Returns a private, writable array with the content of a C-contiguous array in shared memory.

    Args:
        array: array of any shape and of any dtype but object, in memory of ``owner``.
        owner: the object that keeps the memory alive.

    Returns:
        A copy, or a copy-on-write mapping (docs/reference/model-api.md, "What as_numpy returns").
    """
    mapped = _map_copy_on_write(owner, array) if array.nbytes >= _MIN_MAPPED_BYTES else None
    return copy_array(array) if mapped is None else mapped


def copy_array(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a copy of a C-contiguous array of any shape and of any dtype but object."""
    copied: npt.NDArray[Any]
    if array.nbytes < _MIN_THREADED_BYTES or not _core_is_free():
        copied = array.copy()
        return copied
    copied = np.empty_like(array)
    _copy_with_two_threads(copied.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8))
    return copied


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copies bytes into a buffer of the same size. Both are one-dimensional, of format ``B``.

    Raises:
        ValueError: the sizes differ.
    """
    if source.nbytes < _MIN_THREADED_BYTES or source.nbytes != target.nbytes or not _core_is_free():
        target[:] = source
    else:
        _copy_with_two_threads(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _CopyTask:
    """The second part of a copy. The helper thread or the caller runs it, whichever is first.

    The helper holds the lock ``running`` while it runs the task.
    """

    __slots__ = ("_pending", "running")

    def __init__(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        self.running = threading.Lock()
        self._pending = [(target, source)]

    def run(self) -> None:
        """Copies the bytes, unless another thread has started to. numpy releases the GIL."""
        try:
            part = self._pending.pop()
        except IndexError:
            return
        np.copyto(*part)


class _CopyThread:
    """A helper thread that runs a part of each large copy.

    If it is late, the caller copies that part itself.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[_CopyTask] = SimpleQueue()
        threading.Thread(target=self._run, name="pb_utils-copy", daemon=True).start()

    def _run(self) -> None:
        while True:
            task = self.queue.get()
            with task.running:
                task.run()


_copy_thread: _CopyThread | None = None
_start_lock = threading.Lock()


def _copy_with_two_threads(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    global _copy_thread
    if _copy_thread is None:
        try:
            with _start_lock:
                if _copy_thread is None:
                    _copy_thread = _CopyThread()
        except RuntimeError:  # no more threads are allowed
            np.copyto(target, source)
            return
    split = int(_CALLER_SHARE * len(target)) // _PAGE * _PAGE
    task = _CopyTask(target[split:], source[split:])
    _copy_thread.queue.put(task)
    np.copyto(target[:split], source[:split])
    task.run()
    with task.running:
        pass  # wait until the helper has finished a copy that it started


def _reset_after_fork() -> None:
    """Resets a forked child: it has no helper thread, and a lock may still be held."""
    global _copy_thread, _start_lock
    _copy_thread, _start_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)

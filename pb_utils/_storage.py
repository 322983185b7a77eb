"""Arrays over memory of other objects, access to the bytes of arrays, and copies of large arrays.

One core alone does not use the whole memory bandwidth, so a second thread helps if a core is free.
In a stub, a copy-on-write mapping can replace the copy of an array in shared memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    _Array = np.ndarray[Any, Any]
else:
    _Array = np.ndarray  # np.ndarray has no type parameters before Python 3.9


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Returns the bytes of a C-contiguous array as a one-dimensional view of format ``B``.

    ``memoryview.cast`` fails for empty arrays and, on some Python versions, for float16. bfloat16
    does not have a buffer format. In these cases numpy does the cast, which takes three times as
    long.
    """
    try:
        return array.data.cast("B")
    except (AttributeError, TypeError, ValueError):  # AttributeError: masked arrays
        return np.asarray(array).reshape(-1).view(np.uint8).data


def address_of(array: npt.NDArray[Any]) -> int:
    """Returns the memory address of the first element of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


class _ArrayInterface:
    """Gives numpy access to memory. It is the ``base`` of the array and keeps the owner alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def array_at(
    address: int,
    dtype: np.dtype[Any],
    shape: Sequence[int],
    owner: object,
    *,
    strides: Sequence[int] | None = None,
    writable: bool = False,
) -> npt.NDArray[Any]:
    """Returns an array over memory, which keeps the owner of the memory alive.

    A read-only array cannot be made writable: numpy refuses to set its flag.

    Args:
        address: address of the first element.
        dtype: dtype of the array.
        shape: shape of the array.
        owner: the object that keeps the memory alive.
        strides: strides in bytes; C-contiguous if None.
        writable: whether the array is writable.
    """
    interface = {
        "version": 3,
        "typestr": dtype.str,
        "shape": tuple(shape),
        "strides": None if strides is None else tuple(strides),
        "data": (address, not writable),
    }
    array: npt.NDArray[Any] = np.asarray(_ArrayInterface(interface, owner))
    return array


class _OwningBase(_Array):
    """The ``base`` of a view. numpy keeps it alive, and it keeps the owner of the memory alive."""

    owner: object


def read_only_view(
    data: memoryview | bytes, dtype: np.dtype[Any], shape: Sequence[int], owner: object
) -> npt.NDArray[Any]:
    """Returns a read-only array over bytes, which keeps the owner of the bytes alive."""
    base = _OwningBase(tuple(shape), dtype, memoryview(data).toreadonly())
    base.owner = owner
    view: npt.NDArray[Any] = base.view(np.ndarray)
    return view


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
        A copy, or a copy-on-write mapping
        (docs/reference/model-tensors.md, "What as_numpy returns").
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

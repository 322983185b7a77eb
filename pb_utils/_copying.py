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

_LARGE = 1 << 20  # bytes; below, waking a thread takes as long as it saves
_SHOWN = 1 << 18  # bytes; below, a copy takes no longer
_OWN = 0.55  # of the bytes: the helper begins later. More parts would cost more turns of the GIL.
_PAGE = 4096


def _always() -> bool:
    return True


_is_free: Callable[[], bool] = _always


def help_if(is_free: Callable[[], bool]) -> None:
    """Say who tells whether a core is free for a second thread, as far as one can know."""
    global _is_free
    _is_free = is_free


def _shows_nothing(owner: object, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    return None


_show: Callable[[object, npt.NDArray[Any]], npt.NDArray[Any] | None] = _shows_nothing


def show_by(show: Callable[[object, npt.NDArray[Any]], npt.NDArray[Any] | None]) -> None:
    """Say who may have something better than a copy of a large array in memory of ``owner``: a
    writable array with the same content that is as private, or else None.
    """
    global _show
    _show = show


def private_array(array: npt.NDArray[Any], owner: object) -> npt.NDArray[Any]:
    """Return a writable array of the same content that nobody else reads or writes."""
    shown = _show(owner, array) if array.nbytes >= _SHOWN else None
    return copy_of(array) if shown is None else shown


def copy_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a C-contiguous array of any shape and of any dtype but object."""
    made: npt.NDArray[Any]
    if array.nbytes < _LARGE or not _is_free():
        made = array.copy()
        return made
    made = np.empty_like(array)
    _copy(made.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8))
    return made


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy bytes to memory of the same size; both of format ``B`` and one dimension.

    Raises ValueError if the sizes differ.
    """
    if source.nbytes < _LARGE or source.nbytes != target.nbytes or not _is_free():
        target[:] = source
    else:
        _copy(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _Share:
    """A part of a copy, for whoever comes first; the helper holds `helping` meanwhile."""

    __slots__ = ("_parts", "helping")

    def __init__(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        self.helping = threading.Lock()
        self._parts = [(target, source)]

    def take(self) -> None:
        """Copy it, unless somebody else has taken it. numpy lets other threads run meanwhile."""
        try:
            part = self._parts.pop()
        except IndexError:
            return
        np.copyto(*part)


class _Helper:
    """A thread that takes a share of each copy. If it comes late, nothing is left to do."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Share] = SimpleQueue()
        threading.Thread(target=self._run, name="pb_utils-copy", daemon=True).start()

    def _run(self) -> None:
        while True:
            share = self.queue.get()
            with share.helping:
                share.take()


_helper: _Helper | None = None
_starting = threading.Lock()


def _copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    global _helper
    if _helper is None:
        with _starting:
            if _helper is None:
                _helper = _Helper()
    cut = int(_OWN * len(target)) // _PAGE * _PAGE
    share = _Share(target[cut:], source[cut:])
    _helper.queue.put(share)
    np.copyto(target[:cut], source[:cut])
    share.take()
    with share.helping:
        pass  # what the helper has begun is done


def _forget() -> None:
    """A forked child has no helper; the lock may have been held by a thread that it has not."""
    global _helper, _starting
    _helper, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

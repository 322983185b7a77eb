"""Copies of large memory, by two threads: one core alone does not use what the memory can give."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_LARGE = 1 << 20  # bytes; below, waking a thread takes as long as it saves
_PART = 1 << 17


def copy_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a C-contiguous array of any shape and of any dtype but object."""
    made: npt.NDArray[Any]
    if array.nbytes < _LARGE:
        made = array.copy()
        return made
    made = np.empty_like(array)
    _copy(made.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8))
    return made


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy bytes to memory of the same size; both of format ``B`` and one dimension.

    Raises ValueError if the sizes differ.
    """
    if source.nbytes < _LARGE or source.nbytes != target.nbytes:
        target[:] = source
    else:
        _copy(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _Work:
    """A copy in parts, which whoever has time takes; the helper holds `helping` meanwhile."""

    __slots__ = ("helping", "parts")

    def __init__(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        self.helping = threading.Lock()
        self.parts = [
            (target[start : start + _PART], source[start : start + _PART])
            for start in range(0, len(target), _PART)
        ]

    def do(self) -> None:
        """Copy what is left. numpy lets other threads run meanwhile."""
        parts = self.parts
        while True:
            try:
                part = parts.pop()
            except IndexError:
                return
            np.copyto(*part)


class _Helper:
    """A thread that takes a share of copies. One that comes late finds nothing left to do."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work] = SimpleQueue()
        threading.Thread(target=self._run, name="pb_utils-copy", daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self.queue.get()
            with work.helping:
                work.do()
            del work  # and with it the lock; the parts, and their memory, are gone already


_helper: _Helper | None = None
_starting = threading.Lock()


def _copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    global _helper
    if _helper is None:
        with _starting:
            if _helper is None:
                _helper = _Helper()
    work = _Work(target, source)
    _helper.queue.put(work)
    work.do()
    with work.helping:
        pass  # its last part is done


def _forget() -> None:
    """A forked child has no helper; the lock may have been held by a thread that it has not."""
    global _helper, _starting
    _helper, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

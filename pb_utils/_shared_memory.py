"""The shared memory in which an instance passes its tensors on."""

from __future__ import annotations

from pb_utils import _runtime


class SharedMemory:
    """The shared memory of this instance's tensors; the only object is ``shared_memory``."""

    __slots__ = ()

    def __init__(self) -> None:
        """Always fail: use ``shared_memory``.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.SharedMemory: No constructor defined!")

    def free_memory(self) -> int:
        """Return the free bytes: the limit (``--arena-byte-size``) minus the tensors kept here.

        The instance's own tensors count, and those that it received since the first call. Tensors
        that were sent and that others still read do not count, because their memory is released
        soon. Small tensors travel inside messages and do not count.

        Raises:
            TritonModelException: no host runs this model.
        """
        return _runtime.current().free_memory()


shared_memory = SharedMemory.__new__(SharedMemory)

"""The shared memory in which an instance passes its tensors on."""

from __future__ import annotations

from pb_utils import _runtime


class SharedMemory:
    """The memory that this instance's tensors are handed on in; there is one, ``shared_memory``."""

    __slots__ = ()

    def __init__(self) -> None:
        """Refuse: the stub has the only one.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.SharedMemory: No constructor defined!")

    def free_memory(self) -> int:
        """Return the limit (``--arena-byte-size``) less the tensors that this instance keeps there.

        Those are its own and those that others have given it since the first call. What it has
        handed on and others read is not taken off: that comes back by itself, a moment later. So
        a model that keeps nothing finds the same number before and after. Small tensors travel
        inside messages and do not count.

        Raises:
            TritonModelException: no host runs this model.
        """
        return _runtime.current().free_memory()


shared_memory = SharedMemory.__new__(SharedMemory)

"""The shared memory of a model instance."""

from __future__ import annotations

from pb_utils import _runtime


class SharedMemory:
    """The shared memory of this model instance. ``shared_memory`` is the only object."""

    __slots__ = ()

    def __init__(self) -> None:
        """Always raises: use the object ``shared_memory``.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.SharedMemory: No constructor defined!")

    def free_memory(self) -> int:
        """Returns the free shared memory of this instance in bytes.

        The value is the limit ``--arena-byte-size`` minus the tensors in shared memory that the
        model keeps: those that it created, and those that it received since the first call. Sent
        tensors do not count, even if a receiver still reads them, because their memory is released
        soon. Small tensors are sent inside messages and do not count (docs/reference/model-api.md,
        "Options and shared memory").

        Raises:
            TritonModelException: no server runs the model.
        """
        return _runtime.current().free_memory()


shared_memory = SharedMemory.__new__(SharedMemory)

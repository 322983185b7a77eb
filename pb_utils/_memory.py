"""The kinds of memory, and the preferred memory of outputs."""

from __future__ import annotations

from pb_utils import _arguments
from pb_utils._enums import NamedInt
from pb_utils._suggestions import SuggestingType


class MemoryType(NamedInt):
    """The kind of memory in which a tensor is stored."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory(metaclass=SuggestingType):
    """The memory in which a model prefers the outputs of a request to another model.

    The rules are in ``docs/reference/model-api.md``, 3.15 and 4.6.
    """

    __slots__ = ("_device_id", "_type")

    _type: MemoryType | None
    _device_id: int

    @_arguments.with_argument_errors
    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        """Creates a preference.

        Args:
            preferred_memory_type: ``TRITONSERVER_MEMORY_GPU`` or ``TRITONSERVER_MEMORY_CPU``.
            preferred_device_id: device number of the GPU.

        Raises:
            TypeError: the type is not a ``MemoryType`` (a plain number is not accepted), or the id
                is not an integer.
        """
        self._type = _arguments.check_instance(
            "__init__", "preferred_memory_type", preferred_memory_type, MemoryType
        )
        self._device_id = _arguments.check_integer(
            "__init__", "preferred_device_id", preferred_device_id, bits=64, signed=True
        )

    @classmethod
    def _none(cls) -> PreferredMemory:
        """Returns the default, no preference: its ``_type`` is None."""
        memory = cls.__new__(cls)
        memory._type = None
        memory._device_id = 0
        return memory

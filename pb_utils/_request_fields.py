"""The fields of a request: among them its trace, and the preferred memory of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pb_utils import _arguments
from pb_utils._exceptions import NamedInt, SuggestingType
from pb_utils._response import InferenceResponseSender, Responder
from pb_utils._tensor import Tensor


class MemoryType(NamedInt):
    """The kind of memory in which a tensor is stored."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory(metaclass=SuggestingType):
    """The memory in which a model prefers the outputs of a request to another model.

    The rules are in docs/reference/model-module.md, "PreferredMemory", and
    docs/reference/model-tensors.md, "GPU tensors".
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


class InferenceTrace:
    """The trace of a request. A model passes it to the requests that it sends to other models."""

    __slots__ = ("_context", "_number")

    _context: str | None
    _number: int

    def __init__(self) -> None:
        """Always raises: ``InferenceRequest.trace()`` returns traces.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.InferenceTrace: No constructor defined!")

    @classmethod
    def _from_wire(cls, context: str | None, number: int = 0) -> InferenceTrace:
        trace = cls.__new__(cls)
        trace._context = context
        trace._number = number
        return trace

    def get_context(self) -> str | None:
        """Returns the OpenTelemetry propagation headers as JSON text; None if there are none."""
        return self._context


NO_TRACE = InferenceTrace._from_wire(None)


class RequestFields:
    """The fields of an ``InferenceRequest``, without the methods of the API.

    A runtime needs only these fields to send a request to another model. The separate class lets
    ``_request`` import ``_runtime`` without an import cycle.
    """

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_correlation_id",
        "_flags",
        "_handle",
        "_inputs",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_release_flags",
        "_request_id",
        "_requested_output_names",
        "_sender",
        "_timeout",
        "_trace",
    )

    _request_id: str
    _correlation_id: int | str
    _inputs: list[Tensor]
    _requested_output_names: Iterable[str]
    _model_name: str
    _model_version: int
    _flags: int
    _timeout: int
    _parameters: Mapping[str, object]
    _preferred_memory: PreferredMemory
    _trace: InferenceTrace
    _handle: Responder | None
    _sender: InferenceResponseSender | None
    _release_flags: int
    _cancelled: bool

"""The fields of a request, and its trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pb_utils._memory import PreferredMemory
from pb_utils._sender import InferenceResponseSender, Responder
from pb_utils._tensor import Tensor


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

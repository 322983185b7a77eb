"""The fields of a request, and the trace that a request is part of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pb_utils._memory import PreferredMemory
from pb_utils._sender import InferenceResponseSender, Responder
from pb_utils._tensor import Tensor


class InferenceTrace:
    """The trace of a request; pass it to a request to another model to link the two."""

    __slots__ = ("_context", "_number")

    _context: str | None
    _number: int

    def __init__(self) -> None:
        """Always fail: use ``InferenceRequest.trace()``.

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
        """Return the OpenTelemetry propagation headers as JSON text, or None if there are none."""
        return self._context


NO_TRACE = InferenceTrace._from_wire(None)


class RequestFields:
    """What a runtime reads of a request in order to send it to another model.

    ``InferenceRequest`` adds the methods of the API. A runtime does not need these: so
    ``_request`` can depend on the runtime, and not the other way round.
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

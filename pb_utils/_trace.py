"""The trace that a request is part of."""

from __future__ import annotations


class InferenceTrace:
    """Identifies a request's trace; handed on to another model's request, it links the two."""

    __slots__ = ("_context", "_number")

    _context: str | None
    _number: int

    def __init__(self) -> None:
        """Refuse: a trace comes from ``InferenceRequest.trace()``.

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

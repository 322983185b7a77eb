"""The error that a model puts into a response, and the exception that the API raises."""

from __future__ import annotations

from typing import ClassVar

from pb_utils import _arguments
from pb_utils._enums import NamedInt
from pb_utils._model_exception import TritonModelException

__all__ = ["TritonError", "TritonModelException"]


class TritonError:
    """An error that fails one request. It is not an exception: put it into a response."""

    __slots__ = ("_code", "_message")

    class ErrorCode(NamedInt):
        """The kind of failure, which determines the client's status code."""

        UNKNOWN = 0
        INTERNAL = 1
        NOT_FOUND = 2
        INVALID_ARG = 3
        UNAVAILABLE = 4
        UNSUPPORTED = 5
        ALREADY_EXISTS = 6
        CANCELLED = 7

    UNKNOWN: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    INTERNAL: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[ErrorCode] = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[ErrorCode] = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[ErrorCode] = ErrorCode.CANCELLED

    @_arguments.with_argument_errors
    def __init__(
        self, message: str | bytes | bytearray, code: ErrorCode = ErrorCode.INTERNAL
    ) -> None:
        """Create an error with the message and the code that the client receives.

        Raises:
            TypeError: ``message`` is not text, or ``code`` is not an ``ErrorCode``.
        """
        self._message = _arguments.check_message("__init__", "message", message)
        self._code = _arguments.check_instance("__init__", "code", code, TritonError.ErrorCode)

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> ErrorCode:
        """Return the code, one of ``TritonError.UNKNOWN`` ... ``TritonError.CANCELLED``."""
        return self._code

    def __repr__(self) -> str:
        """Show code and text."""
        return f"TritonError({self._message!r}, code=TritonError.{self._code.name})"

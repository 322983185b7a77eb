"""The error of a response, and the exception that the API raises."""

from __future__ import annotations

from typing import ClassVar

from pb_utils import _arguments
from pb_utils._enums import NamedInt
from pb_utils._model_exception import TritonModelException
from pb_utils._suggestions import SuggestingType

__all__ = ["TritonError", "TritonModelException"]


class TritonError(metaclass=SuggestingType):
    """An error that makes one request fail.

    It is not an exception: a model puts it into an ``InferenceResponse``
    (docs/reference/model-api.md, "Errors").

    Examples:
        >>> error = pb_utils.TritonError("X must be positive", pb_utils.TritonError.INVALID_ARG)
        >>> response = pb_utils.InferenceResponse(error=error)
    """

    __slots__ = ("_code", "_message")

    class ErrorCode(NamedInt):
        """The kind of failure. It determines the status code that the client gets."""

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
        """Creates an error.

        Args:
            message: the text that the client gets.
            code: the code that the client gets.

        Raises:
            TypeError: ``message`` is not text, or ``code`` is not a ``TritonError.ErrorCode``. A
                plain number is not accepted.
        """
        self._message = _arguments.check_message("__init__", "message", message)
        self._code = _arguments.check_instance("__init__", "code", code, TritonError.ErrorCode)

    def message(self) -> str:
        """Returns the text of the error."""
        return self._message

    def code(self) -> ErrorCode:
        """Returns the code of the error, for example ``TritonError.INTERNAL``."""
        return self._code

    def __repr__(self) -> str:
        """Shows the text and the code."""
        return f"TritonError({self._message!r}, code=TritonError.{self._code.name})"


TritonError.ErrorCode.__name__ = "__ErrorCode"  # so str() and repr() give Triton's texts

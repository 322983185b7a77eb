"""The response that a model returns, sends or receives, and its error."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pb_utils import _arguments
from pb_utils._exceptions import NamedInt, SuggestingType, TritonModelException
from pb_utils._tensor import Tensor

__all__ = ["TritonError", "TritonModelException"]


class TritonError(metaclass=SuggestingType):
    """An error that makes one request fail.

    It is not an exception: a model puts it into an ``InferenceResponse``
    (docs/reference/model-module.md, "Errors").

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


def to_json(parameters: Mapping[str, object]) -> str:
    """Returns received parameters as JSON text; ``{}`` without any.

    As in Triton, it has no spaces, and letters outside ASCII stand as they are.

    Raises:
        TritonModelException: a value is not a bool, int, float or str.
    """
    for name, value in parameters.items():
        if not isinstance(value, (bool, int, str, float)):
            raise TritonModelException(f"Unsupported parameter type for parameter '{name}'.")
    if not parameters:
        return "{}"
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class InferenceResponse(metaclass=SuggestingType):
    """An inference response: output tensors or an error, and custom parameters.

    The rules are in docs/reference/model-tensors.md, "InferenceResponse".
    """

    __slots__ = ("__weakref__", "_error", "_output_tensors", "_parameters")

    _output_tensors: list[Tensor]
    _error: TritonError | None
    _parameters: Mapping[str, object] | None

    @_arguments.with_argument_errors
    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, bool | int | str] | None = None,
    ) -> None:
        """Creates a response.

        Args:
            output_tensors: output tensors of any shape and data type. The server removes outputs
                that the client did not request.
            error: makes the request fail with this error. The server then ignores output tensors
                and parameters.
            parameters: custom parameters for the client, a dict of str to bool, int (signed, 64
                bits) or str.

        Raises:
            TypeError: an argument has the wrong type. ``error`` must be a ``TritonError``, not a
                str.
            TritonModelException: an output tensor is None, or ``parameters`` is not a dict of str
                to bool, int or str.

        Examples:
            >>> pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)])
            >>> pb_utils.InferenceResponse(error=pb_utils.TritonError("X must be positive"))
        """
        tensors = _arguments.check_elements("__init__", "output_tensors", output_tensors, Tensor)
        if error is not None:
            _arguments.check_instance("__init__", "error", error, TritonError)
        self._parameters = _arguments.check_parameters(parameters)
        self._output_tensors = [tensor for tensor in tensors if tensor is not None]
        if len(self._output_tensors) != len(tensors):
            raise TritonModelException("Output tensor for inference response should not be empty.")
        self._error = error

    @classmethod
    def _from_wire(
        cls,
        output_tensors: list[Tensor],
        error: TritonError | None,
        parameters: Mapping[str, object] | None,
    ) -> InferenceResponse:
        """Creates a received response; ``parameters`` is None if it cannot have any."""
        response = cls.__new__(cls)
        response._output_tensors = output_tensors
        response._error = error
        response._parameters = parameters
        return response

    def output_tensors(self) -> list[Tensor]:
        """Returns the output tensors as a new list."""
        return list(self._output_tensors)

    def has_error(self) -> bool:
        """Returns whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Returns the error; None if the request succeeded."""
        return self._error

    def parameters(self) -> str:
        """Returns the custom parameters as JSON text; ``{}`` if there are none.

        The text is empty for a received error, and for the empty final response of a decoupled
        model (docs/reference/model-bls.md, "Calls").

        Raises:
            TritonModelException: the value of a received parameter is not a bool, int, float or
                str.
        """
        return "" if self._parameters is None else to_json(self._parameters)

    def __repr__(self) -> str:
        """Shows the error or the outputs."""
        if self._error is not None:
            return f"InferenceResponse(error={self._error!r})"
        return f"InferenceResponse(output_tensors={self._output_tensors!r})"


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Returns the first output tensor with a name.

    Args:
        inference_response: the response.
        name: name of the output.

    Returns:
        The tensor, or None if the response has no such output.
    """
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


MORE_THAN_ONE = "Unable to send response. Non-decoupled model cannot send more than one response."
_NOTHING_SENT = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
    "response."
)
_CLOSED = "Unable to send response. Response sender has been closed."


class Responder(ABC):
    """Base class for a runtime's side of a received request; holds the state of its responses.

    The request (as ``_handle``) and its sender refer to the same responder. When both are deleted
    and the responder is not ``closed``, the request can no longer be answered.

    Attributes:
        decoupled: whether the model may send any number of responses.
        has_response: whether a response has been sent.
        closed: whether the final response has been sent, or the request was closed otherwise.
    """

    __slots__ = ("__weakref__", "_lock", "has_response", "closed", "decoupled")

    def __init__(self, decoupled: bool) -> None:
        """Creates the responder of a request without responses."""
        self.decoupled = decoupled
        self.has_response = False
        self.closed = False
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Sends one response, or the final flag alone if ``response`` is None.

        Args:
            response: the response, or None.
            final: whether it is the last response.

        Raises:
            TritonModelException: the request cannot have this response now
                (docs/reference/model-methods.md, "Response sender"), or the response cannot be
                delivered.
        """
        self._check_open(response)
        self._wait_for_credit()  # this may wait, so it does not hold the lock
        with self._lock:
            self._check_open(response)
            self._send_response(response, final)
            self.has_response = self.has_response or response is not None
            self.closed = final
        if final:
            self._wake_senders()

    def close(self) -> bool:
        """Rejects further responses. Returns whether the request was open."""
        with self._lock:
            was_open, self.closed = not self.closed, True
        self._wake_senders()
        return was_open

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Returns whether the client has cancelled the request."""

    def _check_open(self, response: InferenceResponse | None) -> None:
        if not self.decoupled:
            if response is not None and self.has_response:
                raise TritonModelException(MORE_THAN_ONE)
            if response is None and not self.has_response:
                raise TritonModelException(_NOTHING_SENT)
        if self.closed:
            raise TritonModelException(_CLOSED)

    @abstractmethod
    def _wait_for_credit(self) -> None:
        """Waits while the client has not taken too many earlier responses (flow control).

        Raises:
            TritonModelException: the client took none of them within the timeout.
        """

    @abstractmethod
    def _wake_senders(self) -> None:
        """Lets waiting senders see that the request is closed or cancelled."""

    @abstractmethod
    def _send_response(self, response: InferenceResponse | None, final: bool) -> None:
        """Delivers a response. The caller holds the lock."""


class InferenceResponseSender(metaclass=SuggestingType):
    """Sends the responses to one request, from any thread, during and after ``execute``.

    ``InferenceRequest.get_response_sender()`` returns it. The rules are in
    docs/reference/model-methods.md, "Response sender".
    """

    __slots__ = ("__weakref__", "_cancelled", "_responder")

    _responder: Responder | None
    _cancelled: bool

    def __init__(self) -> None:
        """Always raises: ``InferenceRequest.get_response_sender()`` returns senders.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def _from_responder(cls, responder: Responder | None) -> InferenceResponseSender:
        """Creates a sender. ``responder`` is None for a request that the model created itself."""
        sender = cls.__new__(cls)
        sender._responder = responder
        sender._cancelled = False
        return sender

    @_arguments.with_argument_errors
    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response to the client. The server removes outputs that were not requested.

        The call waits while the client has not taken too many earlier responses. A decoupled model
        ends each request with the flag ``TRITONSERVER_RESPONSE_COMPLETE_FINAL``.

        Args:
            response: the response; None, with the final flag, ends the request without another
                response.
            flags: ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` for the last response, else 0.

        Raises:
            TypeError: an argument has the wrong type.
            TritonModelException: the flags are unknown, there is no response although ``flags`` is
                0, the request cannot have this response (for example after the final one), or the
                client took no earlier response within the timeout.

        Examples:
            >>> sender = request.get_response_sender()
            >>> sender.send(response)
            >>> sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """
        checked = _arguments.check_integer("send", "flags", flags, 32)
        if response is not None:
            _arguments.check_instance("send", "response", response, InferenceResponse)
        if checked not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not checked:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if self._responder is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state "
                "of the model."
            )
        self._responder.send(response, bool(checked))

    def is_cancelled(self) -> bool:
        """Returns whether the client has cancelled the request. Once True, it stays True.

        After the final response the result does not change.

        Raises:
            TritonModelException: the model created the request itself.
        """
        if self._responder is None:
            raise TritonModelException(
                "is_cancelled() is only supported on requests that were passed to 'execute'."
            )
        if not self._cancelled:
            self._cancelled = self._responder.is_cancelled()
        return self._cancelled

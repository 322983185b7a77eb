"""The response sender, by which a model sends responses during or after ``execute``."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from pb_utils import _arguments
from pb_utils._exceptions import SuggestingType, TritonModelException
from pb_utils._response import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse

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
                (docs/reference/model-api.md, "Response sender"), or the response cannot be
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
    ``docs/reference/model-api.md``, 2.6.
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

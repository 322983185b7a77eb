"""How a model answers an incoming request when it does not return the response."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from pb_utils import _arguments
from pb_utils._model_exception import TritonModelException
from pb_utils._response import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse

MORE_THAN_ONE = "Unable to send response. Non-decoupled model cannot send more than one response."
_NOTHING_SENT = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
    "response."
)
_CLOSED = "Unable to send response. Response sender has been closed."


class Responder(ABC):
    """One incoming request as its runtime knows it, and how far its answers have got.

    It is the ``_handle`` of the request; the request and its sender hold it. A runtime makes a
    subclass. When both holders are gone and it is not ``closed``, no answer can come any more.
    """

    __slots__ = ("__weakref__", "_lock", "has_response", "closed", "decoupled")

    def __init__(self, decoupled: bool) -> None:
        """Begin without an answer; ``decoupled`` allows any number of them."""
        self.decoupled = decoupled
        self.has_response = False
        self.closed = False
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send one response, or None for an end alone, if the state allows it.

        Raises:
            TritonModelException: it does not (pb_utils spec 2.6), or it cannot be delivered.
        """
        self._check_open(response)
        self._wait_for_credit()  # it may wait, so not with the lock
        with self._lock:
            self._check_open(response)
            self._send_response(response, final)
            self.has_response = self.has_response or response is not None
            self.closed = final

    def close(self) -> bool:
        """Let no further response be sent; return whether one could have been."""
        with self._lock:
            was_open, self.closed = not self.closed, True
            return was_open

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""

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
        """Wait until the caller has taken enough of what was sent before.

        Raises:
            TritonModelException: it has not, for too long.
        """

    @abstractmethod
    def _send_response(self, response: InferenceResponse | None, final: bool) -> None:
        """Pass a response on. Called with the lock held."""


class InferenceResponseSender:
    """Answers one incoming request, from any thread, during and after ``execute``."""

    __slots__ = ("__weakref__", "_cancelled", "_responder")

    _responder: Responder | None
    _cancelled: bool

    def __init__(self) -> None:
        """Refuse: a sender comes from ``InferenceRequest.get_response_sender()``.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def _from_responder(cls, responder: Responder | None) -> InferenceResponseSender:
        """Make a sender; an responder of None is that of a request that the model made itself."""
        sender = cls.__new__(cls)
        sender._responder = responder
        sender._cancelled = False
        return sender

    @_arguments.with_argument_errors
    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; the outputs that nobody asked for are left out.

        Args:
            response: the response; None, with the flag, for an end alone.
            flags: ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` for the last one, else 0.

        Raises:
            TypeError: an argument has another type.
            TritonModelException: another flag, nothing to send, the request was answered
                already, or its caller does not take what was sent before.
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
        """Return whether the client has cancelled the request; once true it stays so.

        After the last response it is what was known then.

        Raises:
            TritonModelException: the model made this request itself.
        """
        if self._responder is None:
            raise TritonModelException(
                "is_cancelled() is only supported on requests that were passed to 'execute'."
            )
        if not self._cancelled:
            self._cancelled = self._responder.is_cancelled()
        return self._cancelled

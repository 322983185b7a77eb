"""Response senders, which answer a request during or after ``execute``."""

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
    """The runtime's side of an incoming request, and the state of its responses.

    The request (as ``_handle``) and its sender refer to it. A runtime defines a subclass. If both
    references are gone and it is not ``closed``, the request can no longer be answered.
    """

    __slots__ = ("__weakref__", "_lock", "has_response", "closed", "decoupled")

    def __init__(self, decoupled: bool) -> None:
        """Create it without responses; ``decoupled`` allows any number of them."""
        self.decoupled = decoupled
        self.has_response = False
        self.closed = False
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send one response, or only the final flag if ``response`` is None.

        Raises:
            TritonModelException: the state does not allow it (docs/reference/model_api.md, 2.6), or
                the response cannot be delivered.
        """
        self._check_open(response)
        self._wait_for_credit()  # without the lock, because it may wait
        with self._lock:
            self._check_open(response)
            self._send_response(response, final)
            self.has_response = self.has_response or response is not None
            self.closed = final

    def close(self) -> bool:
        """Refuse further responses; return whether the request was open."""
        with self._lock:
            was_open, self.closed = not self.closed, True
            return was_open

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request."""

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
        """Wait while too many earlier responses are outstanding.

        Raises:
            TritonModelException: the client received none of them within the timeout.
        """

    @abstractmethod
    def _send_response(self, response: InferenceResponse | None, final: bool) -> None:
        """Deliver a response. Called with the lock held."""


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, during and after ``execute``."""

    __slots__ = ("__weakref__", "_cancelled", "_responder")

    _responder: Responder | None
    _cancelled: bool

    def __init__(self) -> None:
        """Always fail: use ``InferenceRequest.get_response_sender()``.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.InferenceResponseSender: No constructor defined!")

    @classmethod
    def _from_responder(cls, responder: Responder | None) -> InferenceResponseSender:
        """Create a sender; ``responder`` is None for a request that the model made itself."""
        sender = cls.__new__(cls)
        sender._responder = responder
        sender._cancelled = False
        return sender

    @_arguments.with_argument_errors
    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. Outputs that the client did not request are left out.

        Args:
            response: the response; None, with the final flag, ends the request without one.
            flags: ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` for the last one, else 0.

        Raises:
            TypeError: an argument has another type.
            TritonModelException: the flags are unknown, there is nothing to send, the final
                response was sent before, or the client does not receive earlier responses.
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

        After the last response the result does not change.

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

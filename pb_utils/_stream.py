"""The responses to one request that a model has sent, as they come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, MutableSequence
from typing import TYPE_CHECKING

from pb_utils import _runtime, _timer
from pb_utils._errors import TritonError
from pb_utils._response import InferenceResponse

if TYPE_CHECKING:
    import asyncio

    from pb_utils._request_fields import RequestFields


class NoResponseYet(Exception):
    """The next response has not come yet."""


class ResponseStream:
    """A thread of the runtime puts responses in; any thread or event loop takes them out.

    All responses are kept, so that they can be taken again. The runtime holds the stream until
    its end.
    """

    __slots__ = (
        "_cancel_callback",
        "_changed",
        "_done",
        "_next",
        "_responses",
        "_timeout",
        "_waiters",
    )

    def __init__(self) -> None:
        """Begin without a request: whoever fills it calls ``put_response``."""
        self._changed = threading.Condition()  # reentrant: finalisers may run inside
        self._responses: MutableSequence[InferenceResponse] = []
        self._next = 0
        self._done = False
        self._waiters: list[Callable[[], None]] = []
        self._cancel_callback: Callable[[], None] | None = None
        self._timeout: _timer.TimerHandle | None = None

    @classmethod
    def send_request(
        cls, request: RequestFields, decoupled: bool, execution_timeout: float | None
    ) -> ResponseStream:
        """Send a request; after so many seconds cancel it, and end with an error.

        Raises:
            TritonModelException: requests are not allowed at this time.
        """
        stream = cls()
        stream.set_cancel_callback(
            _runtime.current().send_request(request, decoupled, stream.put_response)
        )
        if execution_timeout is not None:
            text = (
                f"The request to model '{request._model_name}' was cancelled: it had not come to "
                f"its end within its execution_timeout of {execution_timeout:g} seconds."
            )
            stream.set_timeout(execution_timeout, text)
        return stream

    def set_cancel_callback(self, callback: Callable[[], None]) -> None:
        """Let ``cancel_request`` call this, once at most."""
        self._cancel_callback = callback
        if self._done:
            self._cancel_callback = None

    def set_timeout(self, seconds: float, text: str) -> InferenceResponse:
        """In so many seconds cancel the request, and end with this error, UNAVAILABLE."""
        late = InferenceResponse._from_wire([], TritonError(text, TritonError.UNAVAILABLE), None)

        def expire() -> None:
            self.cancel_request()
            self.put_response(late, True)

        self._timeout = _timer.call_later(seconds, expire)
        if self._done:
            self._timeout.cancel()
        return late

    def put_response(self, response: InferenceResponse | None, final: bool) -> None:
        """Take the next response; an end alone becomes a response without anything."""
        if response is None:
            response = InferenceResponse._from_wire([], None, None)
        self._put(response, final)

    def put_end(self) -> None:
        """End without a further response."""
        self._put(None, True)

    def _put(self, response: InferenceResponse | None, final: bool) -> None:
        with self._changed:
            if self._done:  # it had expired
                return
            if response is not None:
                self._responses.append(response)
            self._done = final
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        if final:
            self._cancel_callback = None
            if self._timeout is not None:
                self._timeout.cancel()
        for tell in waiters:
            tell()

    def cancel_request(self) -> None:
        """Tell the other model that nobody waits, once, and unless all has come already."""
        callback, self._cancel_callback = self._cancel_callback, None
        if callback is not None:
            callback()

    def discard(self) -> None:
        """Keep nothing more, and cancel. Called by finalisers: it takes no lock."""
        self._responses = deque(maxlen=0)
        if self._timeout is not None:
            self._timeout.cancel()
        self.cancel_request()

    def wait_for_response(self) -> None:
        """Return as soon as there is a response, or the end."""
        with self._changed:
            while not self._responses and not self._done:
                self._changed.wait()

    def next_response(self) -> InferenceResponse | None:
        """Wait for the next response and take it; return None at the end."""
        with self._changed:
            while True:
                try:
                    return self.next_response_nowait()
                except NoResponseYet:
                    self._changed.wait()

    def next_response_nowait(self) -> InferenceResponse | None:
        """Take the next response if it is there; return None at the end.

        Raises:
            NoResponseYet: it is not.
        """
        with self._changed:
            if self._next < len(self._responses):
                self._next += 1
                return self._responses[self._next - 1]
            if self._done:
                return None
            raise NoResponseYet

    def rewind(self) -> None:
        """Begin again with the first response if all have been taken."""
        with self._changed:
            if self._done and self._next >= len(self._responses):
                self._next = 0

    def add_waiter(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, from any thread, as soon as there is something to take."""
        with self._changed:
            if self._next >= len(self._responses) and not self._done:
                self._waiters.append(tell)
                return
        tell()

    def remove_waiter(self, tell: Callable[[], None]) -> None:
        """Do not call ``tell`` any more."""
        with self._changed:
            if tell in self._waiters:
                self._waiters.remove(tell)


def call_soon_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Make a call on an event loop, from any thread; none if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise  # else nobody waits on it any more

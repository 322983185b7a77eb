"""The queue of the responses to one request that a model has sent to another model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, MutableSequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from pb_utils import _runtime, _timer
from pb_utils._errors import TritonError
from pb_utils._response import InferenceResponse

if TYPE_CHECKING:
    import asyncio

    from pb_utils._request_fields import RequestFields


class NoResponseYet(Exception):
    """The next response has not arrived yet."""


class ResponseStream:
    """The responses to one request, in order of arrival.

    A thread of the runtime adds responses; any thread or event loop reads them. Read responses are
    kept, because an iterator can start again. The runtime refers to the stream until the last
    response.
    """

    __slots__ = (
        "_cancel_callback",
        "_changed",
        "_done",
        "_next",
        "_responses",
        "_timeout",
        "_waiters",
        "_waiting",
    )

    def __init__(self) -> None:
        """Creates an empty stream. The runtime adds responses by ``put_response``."""
        # Reentrant, because a finaliser may run while this thread holds it.
        self._changed = threading.Condition()
        self._responses: MutableSequence[InferenceResponse] = []
        self._next = 0
        self._done = False
        self._waiters: list[Callable[[], None]] = []
        self._cancel_callback: Callable[[], None] | None = None
        self._timeout: _timer.TimerHandle | None = None
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def send_request(
        cls, request: RequestFields, decoupled: bool, execution_timeout: float | None
    ) -> ResponseStream:
        """Sends a request and returns the stream of its responses.

        Args:
            request: the request.
            decoupled: whether to accept any number of responses.
            execution_timeout: seconds after which the request is cancelled and the stream ends with
                an error; None for no limit.

        Raises:
            TritonModelException: requests to other models are not allowed at this time.
        """
        stream = cls()
        runtime = _runtime.current()
        stream._waiting = runtime.waiting
        stream.set_cancel_callback(runtime.send_request(request, decoupled, stream.put_response))
        if execution_timeout is not None:
            text = (
                f"The request to model '{request._model_name}' was cancelled: it did not complete "
                f"within its execution_timeout of {execution_timeout:g} seconds."
            )
            stream.set_timeout(execution_timeout, text)
        return stream

    def set_cancel_callback(self, callback: Callable[[], None]) -> None:
        """Sets the function that ``cancel_request`` calls, at most once."""
        self._cancel_callback = callback
        if self._done:
            self._cancel_callback = None

    def set_timeout(self, seconds: float, text: str) -> InferenceResponse:
        """Sets a timeout that cancels the request and ends the stream with an error, UNAVAILABLE.

        Returns:
            The error response, so that the caller can recognise it.
        """
        error = TritonError(text, TritonError.UNAVAILABLE)
        timeout_response = InferenceResponse._from_wire([], error, None)

        def expire() -> None:
            # The error comes first: a cancelled model may answer at once.
            cancel, self._cancel_callback = self._cancel_callback, None
            self.put_response(timeout_response, True)
            if cancel is not None:
                cancel()

        self._timeout = _timer.call_later(seconds, expire)
        if self._done:
            self._timeout.cancel()
        return timeout_response

    def put_response(self, response: InferenceResponse | None, final: bool) -> None:
        """Adds the next response. None, a final flag alone, becomes an empty response."""
        if response is None:
            response = InferenceResponse._from_wire([], None, None)
        self._put(response, final)

    def put_end(self) -> None:
        """Ends the stream without another response."""
        self._put(None, True)

    def _put(self, response: InferenceResponse | None, final: bool) -> None:
        with self._changed:
            if self._done:  # the timeout has expired
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
        for waiter in waiters:
            waiter()

    def cancel_request(self) -> None:
        """Cancels the request, once, unless the last response has arrived."""
        callback, self._cancel_callback = self._cancel_callback, None
        if callback is not None:
            callback()

    def discard(self) -> None:
        """Drops all responses and cancels the request. Finalisers call it: it takes no lock."""
        self._responses = deque(maxlen=0)
        if self._timeout is not None:
            self._timeout.cancel()
        self.cancel_request()

    def wait_for_response(self) -> None:
        """Waits until there is a first response or the stream has ended."""
        with self._changed:
            while not self._responses and not self._done:
                self._wait_for_change()

    def next_response(self) -> InferenceResponse | None:
        """Waits for the next response and returns it; None at the end."""
        with self._changed:
            while True:
                try:
                    return self.next_response_nowait()
                except NoResponseYet:
                    self._wait_for_change()

    def _wait_for_change(self) -> None:
        with self._waiting():
            self._changed.wait()

    def next_response_nowait(self) -> InferenceResponse | None:
        """Returns the next response if it has arrived; None at the end.

        Raises:
            NoResponseYet: it has not arrived.
        """
        with self._changed:
            if self._next < len(self._responses):
                self._next += 1
                return self._responses[self._next - 1]
            if self._done:
                return None
            raise NoResponseYet

    def rewind(self) -> None:
        """Goes back to the first response if all have been read."""
        with self._changed:
            if self._done and self._next >= len(self._responses):
                self._next = 0

    def add_waiter(self, callback: Callable[[], None]) -> None:
        """Calls a function once, from any thread, when there is a response or the end to read."""
        with self._changed:
            if self._next >= len(self._responses) and not self._done:
                self._waiters.append(callback)
                return
        callback()

    def remove_waiter(self, callback: Callable[[], None]) -> None:
        """Removes a waiter, so that it is no longer called."""
        with self._changed:
            if callback in self._waiters:
                self._waiters.remove(callback)


def call_soon_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Makes a call on an event loop, from any thread: at once if the loop is the running one.

    Does nothing if the loop is closed.
    """
    import asyncio  # imported here, because it would slow down the start of every stub

    if asyncio._get_running_loop() is loop:
        call()
        return
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise  # on a closed loop, no coroutine waits for the call

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

    from pb_utils._request import InferenceRequest


class NothingYet(Exception):
    """The next response has not come yet."""


class Stream:
    """A thread of the runtime puts responses in; any thread or event loop takes them out.

    All responses are kept, so that they can be taken again. The runtime holds the stream until
    its end.
    """

    __slots__ = ("_alarm", "_changed", "_done", "_kept", "_next", "_watchers", "_withdraw")

    def __init__(self) -> None:
        """Begin without a request: whoever fills it calls ``receive``."""
        self._changed = threading.Condition()  # reentrant: finalisers may run inside
        self._kept: MutableSequence[InferenceResponse] = []
        self._next = 0
        self._done = False
        self._watchers: list[Callable[[], None]] = []
        self._withdraw: Callable[[], None] | None = None
        self._alarm: _timer.Alarm | None = None

    @classmethod
    def ask(
        cls, request: InferenceRequest, decoupled: bool, execution_timeout: float | None
    ) -> Stream:
        """Send a request; after so many seconds cancel it, and end with an error.

        Raises:
            TritonModelException: requests are not allowed at this time.
        """
        stream = cls()
        stream.cancelled_by(_runtime.current().ask(request, decoupled, stream.receive))
        if execution_timeout is not None:
            text = (
                f"The request to model '{request._model_name}' was cancelled: it had not come to "
                f"its end within its execution_timeout of {execution_timeout:g} seconds."
            )
            stream.expires(execution_timeout, text)
        return stream

    def cancelled_by(self, withdraw: Callable[[], None]) -> None:
        """Let ``cancel`` call this, once at most."""
        self._withdraw = withdraw
        if self._done:
            self._withdraw = None

    def expires(self, seconds: float, text: str) -> InferenceResponse:
        """In so many seconds cancel the request, and end with this error, UNAVAILABLE."""
        late = InferenceResponse._from_wire([], TritonError(text, TritonError.UNAVAILABLE), None)

        def expire() -> None:
            self.cancel()
            self.receive(late, True)

        self._alarm = _timer.after(seconds, expire)
        if self._done:
            self._alarm.stop()
        return late

    def receive(self, response: InferenceResponse | None, final: bool) -> None:
        """Take the next response; an end alone becomes a response without anything."""
        if response is None:
            response = InferenceResponse._from_wire([], None, None)
        self._put(response, final)

    def end(self) -> None:
        """End without a further response."""
        self._put(None, True)

    def _put(self, response: InferenceResponse | None, final: bool) -> None:
        with self._changed:
            if self._done:  # it had expired
                return
            if response is not None:
                self._kept.append(response)
            self._done = final
            self._changed.notify_all()
            watchers, self._watchers = self._watchers, []
        if final:
            self._withdraw = None
            if self._alarm is not None:
                self._alarm.stop()
        for tell in watchers:
            tell()

    def cancel(self) -> None:
        """Tell the other model that nobody waits, once, and unless all has come already."""
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()

    def abandon(self) -> None:
        """Keep nothing more, and cancel. Called by finalisers: it takes no lock."""
        self._kept = deque(maxlen=0)
        if self._alarm is not None:
            self._alarm.stop()
        self.cancel()

    def wait(self) -> None:
        """Return as soon as there is a response, or the end."""
        with self._changed:
            while not self._kept and not self._done:
                self._changed.wait()

    def take(self) -> InferenceResponse | None:
        """Wait for the next response and take it; return None at the end."""
        with self._changed:
            while True:
                try:
                    return self.poll()
                except NothingYet:
                    self._changed.wait()

    def poll(self) -> InferenceResponse | None:
        """Take the next response if it is there; return None at the end.

        Raises:
            NothingYet: it is not.
        """
        with self._changed:
            if self._next < len(self._kept):
                self._next += 1
                return self._kept[self._next - 1]
            if self._done:
                return None
            raise NothingYet

    def rewind(self) -> None:
        """Begin again with the first response if all have been taken."""
        with self._changed:
            if self._done and self._next >= len(self._kept):
                self._next = 0

    def watch(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, from any thread, as soon as there is something to take."""
        with self._changed:
            if self._next >= len(self._kept) and not self._done:
                self._watchers.append(tell)
                return
        tell()

    def unwatch(self, tell: Callable[[], None]) -> None:
        """Do not call ``tell`` any more."""
        with self._changed:
            if tell in self._watchers:
                self._watchers.remove(tell)


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Make a call on an event loop, from any thread; none if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise  # else nobody waits on it any more

"""Requests to other models (BLS): sends them, and waits for their responses."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, MutableSequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from pb_utils import _runtime
from pb_utils._exceptions import TritonModelException
from pb_utils._response import InferenceResponse, TritonError

if TYPE_CHECKING:
    import asyncio

    from pb_utils._request_fields import RequestFields


_MAX_WAIT = 3600.0  # seconds; Condition.wait does not accept every larger value


class TimerHandle:
    """A callback that is scheduled at a timer."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        """Creates the handle; ``Timer.call_later`` does this."""
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Cancels the callback. A finaliser may call this, because it takes no lock."""
        self._callback = None

    def run(self) -> None:
        """Runs the callback, unless it was cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def is_done(self) -> bool:
        """Returns whether the callback has run or was cancelled."""
        return self._callback is None


class Timer:
    """A thread that runs callbacks at their times."""

    def __init__(self) -> None:
        """Creates a timer; its thread starts with the first callback."""
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, TimerHandle]] = []
        self._ids = itertools.count()
        self._cleanup_threshold = 64
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> TimerHandle:
        """Runs a callback after a time, on the timer's thread.

        Args:
            seconds: the time in seconds.
            callback: the function; it must not block.

        Returns:
            A handle that can cancel the callback.
        """
        handle = TimerHandle(callback)
        with self._changed:
            if len(self._due) >= self._cleanup_threshold:
                self._due = [entry for entry in self._due if not entry[2].is_done()]
                heapq.heapify(self._due)
                self._cleanup_threshold = 64 + 2 * len(self._due)
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._ids), handle))
            if self._due[0][2] is handle:
                self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pbhost-timer", daemon=True)
                self._thread.start()
        return handle

    def __len__(self) -> int:
        """Returns the number of scheduled callbacks, with cancelled ones not yet removed."""
        return len(self._due)

    def _run(self) -> None:
        while True:
            self._wait_for_next().run()

    def _wait_for_next(self) -> TimerHandle:
        """Waits until the next callback is due, and returns its handle."""
        with self._changed:
            while True:
                wait = self._due[0][0] - time.monotonic() if self._due else _MAX_WAIT
                if wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(min(wait, _MAX_WAIT))


_timer = Timer()


def call_later(seconds: float, callback: Callable[[], None]) -> TimerHandle:
    """Runs a callback after a time, on the timer thread of the process. It must not block."""
    return _timer.call_later(seconds, callback)


def _reset_after_fork() -> None:
    """Starts afresh in a forked child, which has no timer thread and may have a held lock."""
    global _timer
    _timer = Timer()


os.register_at_fork(after_in_child=_reset_after_fork)


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
        self._timeout: TimerHandle | None = None
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

        self._timeout = call_later(seconds, expire)
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


class ResponseIterator:
    """Iterates over the responses of another model, by ``for`` or ``async for``.

    ``InferenceRequest.exec(decoupled=True)`` returns it. It keeps the responses: a new ``for`` loop
    continues where the last one stopped, or starts again with the first response after the last one
    was read. Deleting the iterator before the last response cancels the request. The rules are in
    docs/reference/model-tensors.md, "ResponseIterator".

    Examples:
        >>> for response in request.exec(decoupled=True):
        ...     total += len(response.output_tensors())
    """

    __slots__ = ("__weakref__", "_stream")

    _stream: ResponseStream

    def __init__(self) -> None:
        """Always raises: ``InferenceRequest.exec(decoupled=True)`` returns iterators.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.ResponseIterator: No constructor defined!")

    @classmethod
    def _from_stream(cls, stream: ResponseStream) -> ResponseIterator:
        iterator = cls.__new__(cls)
        iterator._stream = stream
        weakref.finalize(iterator, stream.discard).atexit = False
        return iterator

    def __iter__(self) -> ResponseIterator:
        """Returns the iterator itself, set back to the first response if all have been read."""
        self._stream.rewind()
        return self

    def __next__(self) -> InferenceResponse:
        """Waits for the next response and returns it.

        If the other model sent its final flag alone, the last response has no outputs, no error and
        no parameters.

        Raises:
            StopIteration: there are no more responses.
        """
        response = self._stream.next_response()
        if response is None:
            raise StopIteration("Iteration is done for the responses.")
        return response

    def __aiter__(self) -> ResponseIterator:
        """Returns the iterator itself, as ``iter`` does."""
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        """Waits for the next response without blocking the event loop. Triton does not have this.

        Raises:
            StopAsyncIteration: there are no more responses.
        """
        import asyncio  # imported here, because it would slow down the start of every stub

        loop = asyncio.get_running_loop()
        more = asyncio.Event()

        def tell() -> None:
            call_soon_on(loop, more.set)

        while True:
            try:
                response = self._stream.next_response_nowait()
            except NoResponseYet:
                more.clear()
                self._stream.add_waiter(tell)
                try:
                    await more.wait()
                finally:
                    self._stream.remove_waiter(tell)
                continue
            if response is None:
                raise StopAsyncIteration("Iteration is done for the responses.")
            return response

    def cancel(self) -> None:
        """Cancels the request. Responses that the other model still sends arrive.

        Later calls, and calls after the last response, do nothing.
        """
        self._stream.cancel_request()


def exec_and_wait(
    request: RequestFields, decoupled: bool, execution_timeout: float | None
) -> InferenceResponse | ResponseIterator:
    """Sends a request, and returns its response, or an iterator once the first response is there.

    Raises:
        TritonModelException: requests to other models are not allowed at this time.
    """
    if not decoupled and execution_timeout is None:
        return _runtime.current().exec(request)
    stream = ResponseStream.send_request(request, decoupled, execution_timeout)
    # The iterator discards the stream if the wait is interrupted.
    iterator = ResponseIterator._from_stream(stream)
    if not decoupled:
        return next(iterator)
    stream.wait_for_response()
    return iterator


def exec_on_event_loop(
    request: RequestFields, decoupled: bool, execution_timeout: float | None
) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]:
    """Sends a request, and returns a future of the running event loop for what ``exec`` returns.

    Raises:
        RuntimeError: no event loop is running.
    """
    import asyncio  # imported here, because it would slow down the start of every stub

    loop = asyncio.get_running_loop()
    if not decoupled and execution_timeout is None:
        return _send_single(request, loop)
    future: asyncio.Future[InferenceResponse | ResponseIterator | None] = loop.create_future()
    try:
        stream = ResponseStream.send_request(request, decoupled, execution_timeout)
    except TritonModelException as error:
        future.set_exception(error)
        return future  # type: ignore[return-value]

    # The iterator discards the stream when these closures are deleted.
    iterator = ResponseIterator._from_stream(stream)

    def set_result() -> None:
        if not future.done():
            future.set_result(iterator if decoupled else stream.next_response_nowait())

    def discard_if_cancelled(
        future: asyncio.Future[InferenceResponse | ResponseIterator | None],
    ) -> None:
        if future.cancelled():
            stream.discard()

    future.add_done_callback(discard_if_cancelled)
    stream.add_waiter(lambda: call_soon_on(loop, set_result))
    return future  # type: ignore[return-value]


def _send_single(
    request: RequestFields, loop: asyncio.AbstractEventLoop
) -> asyncio.Future[InferenceResponse]:
    """Does as ``exec_on_event_loop`` for a single response, which needs no stream."""
    future: asyncio.Future[InferenceResponse] = loop.create_future()

    def receive(response: InferenceResponse | None, final: bool) -> None:
        if response is None:
            response = InferenceResponse._from_wire([], None, None)
        call_soon_on(loop, partial(_set_result, future, response))

    try:
        cancel_request = _runtime.current().send_request(request, False, receive)
    except TritonModelException as error:
        future.set_exception(error)
        return future

    def cancel_if_cancelled(future: asyncio.Future[InferenceResponse]) -> None:
        if future.cancelled():
            cancel_request()

    future.add_done_callback(cancel_if_cancelled)
    return future


def _set_result(future: asyncio.Future[InferenceResponse], response: InferenceResponse) -> None:
    if not future.done():  # it was not cancelled
        future.set_result(response)

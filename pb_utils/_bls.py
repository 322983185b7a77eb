"""Requests to other models (BLS): sends them, and waits for their responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pb_utils import _runtime
from pb_utils._iterator import ResponseIterator
from pb_utils._model_exception import TritonModelException
from pb_utils._response import InferenceResponse
from pb_utils._stream import ResponseStream, call_soon_on

if TYPE_CHECKING:
    import asyncio

    from pb_utils._request_fields import RequestFields


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

"""Sending a request to another model (BLS), and waiting for what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pb_utils import _runtime
from pb_utils._iterator import ResponseIterator
from pb_utils._model_exception import TritonModelException
from pb_utils._stream import Stream, call_on

if TYPE_CHECKING:
    import asyncio

    from pb_utils._request import InferenceRequest
    from pb_utils._response import InferenceResponse


def ask_and_wait(
    request: InferenceRequest, decoupled: bool, execution_timeout: float | None
) -> InferenceResponse | ResponseIterator:
    """Return the only response, or an iterator as soon as there is a first one.

    Raises:
        TritonModelException: requests are not allowed at this time.
    """
    if not decoupled and execution_timeout is None:
        return _runtime.current().exec(request)
    stream = Stream.ask(request, decoupled, execution_timeout)
    iterator = ResponseIterator._of(stream)  # gives the stream up if the wait is interrupted
    if not decoupled:
        return next(iterator)
    stream.wait()
    return iterator


def ask_on_loop(
    request: InferenceRequest, decoupled: bool, execution_timeout: float | None
) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]:
    """Return a future, on the running event loop, of what ``ask_and_wait`` returns.

    Raises:
        RuntimeError: no event loop is running.
    """
    import asyncio  # not before it is needed: it would slow down every start

    loop = asyncio.get_running_loop()
    future: asyncio.Future[InferenceResponse | ResponseIterator | None] = loop.create_future()
    try:
        stream = Stream.ask(request, decoupled, execution_timeout)
    except TritonModelException as error:
        future.set_exception(error)
        return future  # type: ignore[return-value]

    iterator = ResponseIterator._of(stream)  # gives the stream up with the last of these closures

    def settle() -> None:
        if not future.done():
            future.set_result(iterator if decoupled else stream.poll())

    def settled(future: asyncio.Future[InferenceResponse | ResponseIterator | None]) -> None:
        if future.cancelled():
            stream.abandon()

    future.add_done_callback(settled)
    stream.watch(lambda: call_on(loop, settle))
    return future  # type: ignore[return-value]

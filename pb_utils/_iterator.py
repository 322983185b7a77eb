"""The iterator over the responses to a request that a model has sent to another model."""

from __future__ import annotations

import weakref

from pb_utils._response import InferenceResponse
from pb_utils._stream import NoResponseYet, ResponseStream, call_soon_on


class ResponseIterator:
    """Iterates over the responses of another model, by ``for`` or ``async for``.

    ``InferenceRequest.exec(decoupled=True)`` returns it. It keeps the responses: a new ``for`` loop
    continues where the last one stopped, or starts again with the first response after the last one
    was read. Deleting the iterator before the last response cancels the request. The rules are in
    ``docs/reference/model-api.md``, 3.10.

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

"""The iterator over the responses of a decoupled model."""

from __future__ import annotations

import weakref

from pb_utils._response import InferenceResponse
from pb_utils._stream import NoResponseYet, ResponseStream, call_soon_on


class ResponseIterator:
    """Iterates over the responses of another model, by ``for`` or ``async for``.

    The responses are kept: after the last one, another ``for`` starts again with the first one;
    before that, it continues. Deleting the iterator before the end cancels the request.
    """

    __slots__ = ("__weakref__", "_stream")

    _stream: ResponseStream

    def __init__(self) -> None:
        """Always fail: use ``InferenceRequest.exec(decoupled=True)``.

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
        """Return the iterator itself, at the first response again if all have been taken."""
        self._stream.rewind()
        return self

    def __next__(self) -> InferenceResponse:
        """Wait for the next response.

        If the model ends with only a final flag, the last response has no outputs, error or
        parameters.

        Raises:
            StopIteration: there are no more responses.
        """
        response = self._stream.next_response()
        if response is None:
            raise StopIteration("Iteration is done for the responses.")
        return response

    def __aiter__(self) -> ResponseIterator:
        """Return the iterator itself, as ``iter`` does."""
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        """Wait for the next response without blocking the event loop (Triton lacks this).

        Raises:
            StopAsyncIteration: there are no more responses.
        """
        import asyncio  # not before it is needed: it would slow down every start

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
        """Cancel the request; responses that the other model still sends arrive.

        Has no effect after the last response or after an earlier call.
        """
        self._stream.cancel_request()

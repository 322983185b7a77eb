"""What a model gets from a request that may be answered several times."""

from __future__ import annotations

import weakref

from pb_utils._response import InferenceResponse
from pb_utils._stream import NoResponseYet, ResponseStream, call_soon_on


class ResponseIterator:
    """Gives the responses of another model one after the other: ``for`` or ``async for``.

    The responses are kept. When all have been taken, a further ``for`` begins again with the first
    one; before that, it goes on where the last one stopped. An iterator that is dropped before the
    end cancels its request.
    """

    __slots__ = ("__weakref__", "_stream")

    _stream: ResponseStream

    def __init__(self) -> None:
        """Refuse: an iterator comes from ``InferenceRequest.exec(decoupled=True)``.

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

        A model that ends without a last response gives one without outputs, error or parameters.

        Raises:
            StopIteration: that was the last one.
        """
        response = self._stream.next_response()
        if response is None:
            raise StopIteration("Iteration is done for the responses.")
        return response

    def __aiter__(self) -> ResponseIterator:
        """Return the iterator itself, as ``iter`` does."""
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        """Wait for the next response without holding up the event loop (not in Triton).

        Raises:
            StopAsyncIteration: that was the last one.
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
        """Tell the other model that nobody waits for the rest; what it still sends arrives.

        Nothing happens if all has come, or if it was told before.
        """
        self._stream.cancel_request()

"""The flow control of responses: limits of a stub, and the acknowledgements that it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from host.inference.request import InferResponse
from stub.wire import messages as m

ACK_COUNT, _ACK_BYTES, _ACK_NS = 32, 1 << 20, 250_000_000
"""Responses, their bytes, and the time, after which the stub is notified that they were
acknowledged.

The first two are below the limits on outstanding responses, so that a sender never waits for an
acknowledgement that is only delayed. With the third, a sender sees that a slow caller makes
progress before its `send_timeout` is over.
"""


@dataclass(frozen=True)
class FlowControlSettings:
    """Limits outstanding responses of one request, and the seconds that a sender waits for them.

    A response is outstanding until the caller has acknowledged it.
    """

    max_outstanding_responses: int = 128
    send_timeout: float = 60.0


class ResponseAckSender:
    """Collects acknowledged responses of one request until the stub is notified.

    `ack`: sends a message to the stub. `limit`: responses after which it is notified. `clock`:
    returns the time in nanoseconds.
    """

    __slots__ = ("_ack", "_batch", "_bytes", "_clock", "_count", "_index", "_limit", "_told_ns")

    def __init__(
        self,
        ack: Callable[[m.ToStub], None],
        batch: int,
        index: int,
        limit: int,
        clock: Callable[[], int],
    ) -> None:
        self._ack = ack
        self._clock = clock
        self._told_ns = clock()  # when the stub was told last
        self._limit = limit
        self._batch = batch
        self._index = index
        self._count = self._bytes = 0

    def count_response(self, response: InferResponse) -> None:
        """Counts an acknowledged response; tells the stub when enough of them are collected."""
        self._count += 1
        self._bytes += sum(len(output.data) for output in response.outputs)
        now = self._clock()
        if (
            self._count >= self._limit
            or self._bytes >= _ACK_BYTES
            or now - self._told_ns >= _ACK_NS
        ):
            self._ack(m.ResponseAck(self._batch, self._index, self._count))
            self._count = self._bytes = 0
            self._told_ns = now

"""Joins the BLS requests that coroutines send in one turn of their event loop."""

import threading
import time
from typing import Callable, Optional, Sequence

from stub.channel import Channel
from stub.wire.messages import ToHost

_BURST_SECONDS = 0.0005  # requests that follow each other more quickly are joined
_FLUSH_MILLISECONDS = 2  # how long a blocked event loop can delay a joined request
_IDLE_CHECKS = 25  # without joined requests, after which the service thread stops checking


class BlsBursts:
    """Sends the first request of a burst at once, and the others in one frame at the end of a turn.

    A coroutine may compute while its requests run, so that the turn ends late. Therefore the
    service thread sends what has waited since its last check, as long as there are bursts.
    """

    def __init__(self, channel: Channel, wake: Callable[[], None]) -> None:
        """`wake`: wakes the service thread."""
        self._channel = channel
        self._wake = wake
        self._lock = threading.RLock()  # reentrant: finalisers of the model send requests
        self._last_sent = 0.0
        self._turn_open = False
        self._joined = False  # since the last check
        self._idle_checks = _IDLE_CHECKS

    def send(self, messages: Sequence[ToHost]) -> None:
        """Sends or queues messages, on the thread of the event loop."""
        now = time.monotonic()
        burst = now - self._last_sent < _BURST_SECONDS
        self._last_sent = now
        if not burst:
            self._channel.send(messages)
            return
        self._channel.queue(messages)
        if not self._turn_open:
            import asyncio  # a model without coroutines starts faster without it

            self._turn_open = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            with self._lock:
                self._joined = True
                if self._idle_checks >= _IDLE_CHECKS:
                    self._idle_checks = 0
                    self._wake()

    def _end_turn(self) -> None:
        self._turn_open = False
        self._channel.flush()

    def check(self) -> Optional[int]:
        """Sends requests that wait; returns milliseconds to the next check, None if there is none.

        Only the service thread calls it.
        """
        with self._lock:
            if self._idle_checks >= _IDLE_CHECKS:
                return None
            self._idle_checks = 0 if self._joined else self._idle_checks + 1
            self._joined = False
        self._channel.flush()
        return _FLUSH_MILLISECONDS

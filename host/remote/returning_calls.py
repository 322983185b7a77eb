"""Calls of this server that wait for a call of another server to one of its own models."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from host.inference.call import Call

_SETTLED_NS = 1_000_000_000
"""A model that asks another one without waiting for it has probably responded by then."""


class ReturningCalls:
    """Tells which calls of other servers were made for a call to a remote model.

    A request names the calls to remote models that it was made for (`InferRequest.ancestors`), in
    whichever servers. So the deadlock detector sees a request that waits for itself, although
    other servers are in between. Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._server = secrets.token_hex(8)
        self._last = 0
        self._returned: dict[str, dict[Call, None]] = {}

    def add_outgoing(self) -> str:
        """Returns an id for a call to a remote model."""
        self._last += 1
        name = f"{self._server}/{self._last}"
        self._returned[name] = {}
        return name

    def remove_outgoing(self, name: str) -> None:
        """To be called when the call has ended."""
        del self._returned[name]

    @contextmanager
    def incoming(self, call: Call) -> Iterator[None]:
        """Within the block, the call of another server is in progress."""
        waiting = [
            self._returned[name] for name in call.request.ancestors if name in self._returned
        ]
        for calls in waiting:
            calls[call] = None
        try:
            yield
        finally:
            for calls in waiting:
                calls.pop(call, None)

    def made_for(self, name: str) -> Sequence[Call]:
        """The calls that have arrived for an outgoing call, and that it may wait for."""
        settled = time.monotonic_ns() - _SETTLED_NS
        return [call for call in self._returned.get(name, ()) if call.received_ns < settled]

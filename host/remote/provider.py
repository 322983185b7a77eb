"""The interface to the servers of remote models, and limits on what they send."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from host.config.model_config import ModelConfig
from host.inference.call import Call
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest, InferResponse

ResponseStream = AsyncGenerator[tuple[InferResponse | None, bool], None]
"""Each response, and whether it is the last one; None is an end without a response."""


@dataclass(frozen=True, slots=True)
class RemoteVersion:
    """A version of a model that another server has loaded.

    Attributes:
        version: Its number.
        config: Its complete configuration.
        labels: Names of classes, by output.
        defines_is_ready: Whether the model defines `is_ready`.
        reason: Why it is not ready; "" if it is.
    """

    version: int
    config: ModelConfig
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defines_is_ready: bool = False
    reason: str = ""


class RemoteModelProvider(Protocol):
    """Connects a server with the models of others. All methods run on the server's event loop.

    The server asks only when it needs an answer: `describe` at the first request for a model and
    whenever a client wants to know about it, never at the start unless an ensemble needs it. So
    servers whose models call each other can start in any order.
    """

    def serves(self, name: str) -> bool:
        """Whether the model belongs to another server, loaded or not. Must not block.

        Such a model is never loaded in this server.
        """

    async def describe(self, name: str) -> Sequence[RemoteVersion]:
        """The versions of a model that are loaded now. Raises HostError."""

    def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Sends a request to the model; yields its responses in order. Raises HostError.

        `headers`: the W3C trace context, for the other server. Closing the stream cancels the
        request. The memory of the tensors is valid until the stream has ended.
        """

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """The statistics of a model, all of its servers together. Raises HostError.

        `version`: "" for all.
        """

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The entries of all remote models in the repository index. Raises HostError.

        `ready`: only of the versions that are ready.
        """

    async def ready(self) -> bool:
        """Whether all remote models are ready that should be."""


WINDOW_BYTES = 4 << 20
"""Bytes of tensors of one request's responses from which on the next one waits."""


class ResponseWindow:
    """Lets the next response wait while too many are not acknowledged. Belongs to one event loop.

    `most`: responses from which on the next one waits, if `WINDOW_BYTES` of them do not suffice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: deque[int] = deque()  # of the responses that are not acknowledged
        self._bytes = 0
        self._changed = asyncio.Event()

    def sent(self, size: int) -> None:
        """Counts a response with `size` bytes of tensors."""
        self._sizes.append(size)
        self._bytes += size

    def acknowledge(self, count: int = 1) -> None:
        """The receiver has taken the oldest ones."""
        for _ in range(min(count, len(self._sizes))):
            self._bytes -= self._sizes.popleft()
        self._changed.set()

    async def wait(self) -> None:
        """Returns once another response may be sent."""
        while len(self._sizes) >= self._most or self._bytes >= WINDOW_BYTES:
            self._changed.clear()
            await self._changed.wait()


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

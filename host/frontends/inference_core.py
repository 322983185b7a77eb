"""The core as the inference endpoints see it: in their own process, or in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from host.cache.responses import CacheHit
from host.config.schema import ModelConfig
from host.errors import unavailable
from host.inference.call import Call
from host.inference.request import InferRequest, RequestTracer, SharedMemoryBytes

_Started = TypeVar("_Started")


class Cancellable(Protocol):
    """Work in progress."""

    def cancel(self) -> object:
        """Cancels the work."""


class RegionLookup(Protocol):
    """Finds tensors in shared memory that clients have registered."""

    def find_block(self, name: str, offset: int, byte_size: int) -> SharedMemoryBytes:
        """The place of a tensor in a region; offset and size in bytes. Raises HostError."""


class InferenceClient(Protocol):
    """A client that is known by its API key."""

    def check_model(self, name: str) -> None:
        """Raises HostError PERMISSION_DENIED unless the client may ask a model."""

    def start_request(self, start: Callable[[], Call]) -> Call:
        """Starts an inference request and counts it. Raises what `start` raises, or HostError."""

    async def start_after_wait(self, start: Callable[[], Awaitable[Call]]) -> Call:
        """As `start_request`, but `start` waits before the request starts, which counts too."""


class InferenceKeys(Protocol):
    """The API keys that clients need to send inference requests."""

    def authorize(self, category: str, header: str | bytes | None, /) -> InferenceClient:
        """The client of a header `Authorization`. Raises HostError."""


class SendingClient(InferenceClient, Protocol):
    """A client whose requests are those that are sent in a context."""

    def sending(self) -> AbstractContextManager[None]:
        """While this is open, requests are those of the client."""


class SendingKeys(Protocol):
    """The API keys in a process that passes requests on."""

    def authorize(self, category: str, header: str | bytes | None, /) -> SendingClient:
        """The client of a header `Authorization`. Raises HostError."""


class InferenceCore(Protocol):
    """What the inference endpoints need of the core.

    `host.core.Core` is the core itself, in the process of the server. `CoreProxy` speaks to it from
    a frontend process (`host.frontend_processes`). Belongs to the event loop.
    """

    @property
    def regions(self) -> RegionLookup:
        """Shared memory that clients have registered."""

    @property
    def request_tracer(self) -> RequestTracer | None:
        """Decides which requests are traced; None while none is."""

    @property
    def loads_on_demand(self) -> bool:
        """Whether `start_when_loaded` can load models."""

    def infer(self, request: InferRequest, unary: bool = False) -> Call:
        """Starts a request. `unary`: the endpoint cannot carry responses of a decoupled model.

        Raises NotServedError if the model is missing, so that `start_when_loaded` may help. Another
        error is raised as HostError, or is the response of the call.
        """

    def repeat_cache_hit(self, name: str, version: int, hit: CacheHit) -> bool:
        """Counts a request that is equal to one that the response cache has answered with `hit`.

        The caller sends the same response. False if only `infer` can answer; nothing is counted.
        """

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """Calls `start` and returns its result.

        If it raises NotServedError and the model of the request loads on demand, waits for the
        model and calls `start` again. Raises HostError.
        """

    async def infer_when_loaded(self, request: InferRequest) -> Call:
        """As `infer`, but waits for the model if it is not loaded and loads on demand."""

    def model_config(self, name: str, version: str) -> ModelConfig:
        """The complete configuration of a model. Raises HostError if it is missing."""

    async def config_when_loaded(self, name: str, version: str) -> ModelConfig:
        """As `model_config`, but waits for the model if it is not loaded and loads on demand."""

    def tensor_counts(self, name: str, version: str) -> tuple[int, int]:
        """The numbers of inputs and outputs of a model; (0, 0) if it is missing."""


class OpenRequests:
    """Counts requests. Belongs to the thread of the event loop.

    A frontend enters it for each request, or increments `count` and calls `request_finished`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        """Whether new requests are refused."""
        self._all_answered = asyncio.Event()

    def __enter__(self) -> None:
        """Counts a request within a `with` block. Raises HostError UNAVAILABLE while draining."""
        if self.draining:
            raise unavailable("Server exiting")
        self.count += 1

    def __exit__(self, *error: object) -> None:
        """Ends the request."""
        self.request_finished()

    def request_finished(self) -> None:
        """Decrements `count` after a request was answered."""
        self.count -= 1
        if self.draining:
            self.signal_if_drained()

    def signal_if_drained(self) -> None:
        """Ends the wait of `drain` if no request is open."""
        if not self.count:
            self._all_answered.set()

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for open ones, at most `timeout` seconds.

        Returns False if some are still open.
        """
        self.draining = True
        if not self.count:
            return True
        try:
            await asyncio.wait_for(self._all_answered.wait(), max(timeout, 0.0))
        except asyncio.TimeoutError:
            return False
        return True

"""The contract with the program that connects servers and carries requests between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.config.model_config import ModelConfig
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

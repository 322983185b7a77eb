"""The part that a program with a server inside takes in loads and unloads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from host.inference.request import Parameter

LoadParameters = Mapping[str, Parameter | bytes]
"""The parameters of a load: `config`, and contents of files by `file:<path>`."""


class ModelControlHook(Protocol):
    """Is called instead of the loads and unloads that clients and models ask for.

    It decides whether and when this server does what was asked, and can pass it on to other
    servers. What it raises as HostError is the answer. Loads at the start, on demand, by the poller
    and by `Server.load_model` do not go through it; nor does a model of this server that another
    loads in `initialize`, as each server with the other one loads it.

    For the server that asks, only `load_here` and `unload_here` will do: `Server.load_model` waits
    for a place among the loads in progress, and for other loads of the same model.
    """

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Loads or reloads a model. `load_here` does it in this server; it raises HostError."""

    async def unload(
        self, name: str, unload_dependents: bool, unload_here: Callable[[], Awaitable[None]]
    ) -> None:
        """Unloads a model. `unload_here` does it in this server; it raises HostError."""

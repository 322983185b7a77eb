"""The contract of whatever keeps responses, local or far away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from host.errors import HostError
from host.inference.request import Tensor
from host.metrics.catalogue import MetricsSnapshot

CachedOutputs = Sequence[Tensor]
"""What is kept of a response; the tensors' `data` are bytes of their own."""

LookupCallback = Callable[[CachedOutputs | None], None]
InsertCallback = Callable[[HostError | None], None]


class ResponseStore(Protocol):
    """Keeps outputs by key. All methods belong to the event loop; none of them waits."""

    def look_up(self, key: bytes, on_found: LookupCallback) -> None:
        """Call `on_found`, at once or later, with the outputs of that key, None if there are none.

        What goes wrong is logged, and nothing is found.
        """

    def insert(self, key: bytes, outputs: CachedOutputs, on_inserted: InsertCallback) -> None:
        """Keep outputs that will not change, unless the key has some already.

        Calls `on_inserted`, at once or later: with None, ALREADY_EXISTS, or what went wrong.
        """

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Put the store's own series on the snapshot."""

    async def close(self) -> None:
        """Forget what is under way."""

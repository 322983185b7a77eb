"""The interface of response cache stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from host.errors import HostError
from host.inference.request import Tensor
from host.metrics.catalogue import MetricsSnapshot

CachedOutputs = Sequence[Tensor]
"""The outputs of a response; the `data` of the tensors are `bytes`."""

LookupCallback = Callable[[CachedOutputs | None], None]
InsertCallback = Callable[[HostError | None], None]


class ResponseStore(Protocol):
    """Stores outputs by key. All methods must be called on the event loop; none blocks."""

    def look_up(self, key: bytes, on_found: LookupCallback) -> None:
        """Calls `on_found`, at once or later, with the outputs of the key, or None.

        A failure is logged and counts as not found.
        """

    def repeat_hit(self, key: bytes, outputs: CachedOutputs) -> bool:
        """Looks up a key that was found before, at once; whether it still has the same outputs.

        Nothing is counted if it has not: `look_up` follows. A store that has to wait returns False.
        """

    def insert(self, key: bytes, outputs: CachedOutputs, on_inserted: InsertCallback) -> None:
        """Stores outputs, which must no longer change, unless the key exists.

        Calls `on_inserted`, at once or later, with None or the error: ALREADY_EXISTS if the key
        exists.
        """

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the metrics of the store to the snapshot."""

    async def close(self) -> None:
        """Cancels pending operations and releases resources."""

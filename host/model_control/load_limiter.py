"""Limits how many model versions load at the same time, and records which load waits for which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from host.errors import invalid_argument
from host.models.lendable_semaphore import LendableSemaphore


class LoadLimiter(LendableSemaphore):
    """A semaphore of `count` slots that every load of a version holds. Belongs to the event loop.

    A model may load other models in its `initialize`. Its own load gives its slot back while it
    waits for them, so that even one slot is enough. A load that would wait for itself is refused.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._waits: dict[str, list[str]] = {}

    @contextmanager
    def lend_slot(self, requester: str, target: str) -> Iterator[None]:
        """While entered, the load of model `requester` waits for that of `target`, without a slot.

        Raises HostError INVALID_ARG if neither load could ever end.
        """
        chain = self.find_wait_chain(target, requester)
        if chain:
            raise invalid_argument(
                f"'initialize' of model '{requester}' requests it, and would wait for itself:"
                f" {' -> '.join([requester, *chain])}. Load one of them before the others, or from"
                " 'execute'"
            )
        with self.waits_for(requester, target), self.lend():
            yield

    @contextmanager
    def waits_for(self, requester: str, target: str) -> Iterator[None]:
        """While entered, the load of `requester`, which holds no slot yet, waits for `target`."""
        self._waits.setdefault(requester, []).append(target)
        try:
            yield
        finally:
            self._waits[requester].remove(target)
            if not self._waits[requester]:
                del self._waits[requester]

    def find_wait_chain(self, start: str, end: str) -> list[str]:
        """The models from `start` to `end`, each waiting for the next; empty without a chain."""
        if start == end:
            return [end]
        for following in self._waits.get(start, ()):
            rest = self.find_wait_chain(following, end)
            if rest:
                return [start, *rest]
        return []

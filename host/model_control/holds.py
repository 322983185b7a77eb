"""Holds: model instances keep other models loaded while they use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class ModelHolds:
    """Counts the holds on each model by their holders, which are objects that stand for instances.

    Source: docs/reference/model-api.md, "Model control". Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[object]] = {}
        self._loaded_by_hold: set[str] = set()

    def add(self, name: str, holder: object, loads: bool) -> None:
        """Adds a hold; `loads`: the model was not loaded before."""
        if name not in self._counts:
            self._counts[name] = Counter()
            if loads:
                self._loaded_by_hold.add(name)
        self._counts[name][holder] += 1

    def keep_loaded(self, name: str) -> None:
        """Called when the model is loaded without a hold: it stays loaded when the holds end."""
        self._loaded_by_hold.discard(name)

    def release(self, name: str, holder: object) -> None:
        """Removes one hold, if there is one."""
        counts = self._counts.get(name)
        if counts is not None and holder in counts:
            counts[holder] -= 1
            if not counts[holder]:
                self._remove(name, holder)

    def release_all(self, holder: object) -> list[str]:
        """Removes all holds of an instance that has ended.

        Returns the models that were loaded by a hold and have none any more.
        """
        released = []
        for name in [name for name, counts in self._counts.items() if holder in counts]:
            loaded_by_hold = name in self._loaded_by_hold
            self._remove(name, holder)
            if loaded_by_hold and name not in self._counts:
                released.append(name)
        return released

    def are_held(self, names: Iterable[str]) -> bool:
        """Whether any of these models is held."""
        return any(name in self._counts for name in names)

    def _remove(self, name: str, holder: object) -> None:
        del self._counts[name][holder]
        if not self._counts[name]:
            del self._counts[name]
            self._loaded_by_hold.discard(name)

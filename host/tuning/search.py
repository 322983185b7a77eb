"""Searches for the best settings: changes one at a time, and goes on while the gain is no noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from host.tuning.settings import Settings

_LEAST_GAIN = 0.03
_PATIENCE = 2  # steps without a gain, after which a direction is given up
_ROUNDS = 4
_EQUAL = 0.97  # of the best score: cheaper settings are preferred
_DELAYS = (100, 500, 2000)  # microseconds
_PRECISION = 8  # the highest load is found to an eighth


class Scored(Protocol):
    """The result of a measurement."""

    @property
    def score(self) -> float:
        """How good it is; more is better."""

    @property
    def noise(self) -> float:
        """The share by which the score may be wrong."""


class Loaded(Protocol):
    """The result of a measurement at one concurrency."""

    @property
    def met(self) -> bool:
        """Whether the latency is short enough."""

    @property
    def rate(self) -> float:
        """Requests per second."""


_Result = TypeVar("_Result", bound=Scored)
_Loaded = TypeVar("_Loaded", bound=Loaded)


@dataclass(frozen=True)
class Limits:
    """The largest settings that are tried. `batching`: whether the model can have batches."""

    instances: int
    batch: int
    batching: bool


class Search(Generic[_Result]):
    """Finds settings. `measure` returns None if they do not work, or no time is left.

    Attributes:
        results: all that was measured, by settings.
        best: the best settings so far.
    """

    def __init__(
        self, start: Settings, limits: Limits, measure: Callable[[Settings], _Result | None]
    ) -> None:
        self.results: dict[Settings, _Result | None] = {}
        self._least_batch = start.max_batch_size  # clients may send batches of this size
        self.best = start
        self._limits = limits
        self._measure = measure

    def run(self) -> Settings:
        """Returns the best settings; the cheapest of those that are about as good."""
        self._result_of(self.best)
        for _ in range(_ROUNDS):
            before = self.best
            self._climb(self._instances(_larger(self.best.instances, self._limits.instances)))
            self._climb(self._instances(_smaller(self.best.instances)), self._is_as_good)
            if self._limits.batching:
                self._climb(self._batches(_larger(self.best.batch, self._limits.batch)))
                self._climb(self._batches(_smaller(self.best.batch)), self._is_as_good)
            if self.best == before:
                break
        middle = self.best.instances
        between = (middle * 3 // 4, middle * 3 // 2)
        self._climb(self._instances(n for n in between if 0 < n <= self._limits.instances))
        if self.best.dynamic:
            self._tune_delay()
        self.best = self._cheapest()
        return self.best

    def _tune_delay(self) -> None:
        best = self.best
        if best.delay or best.preferred:
            self._climb([replace(best, delay=0, preferred=())], self._is_as_good)
        delays = (delay for delay in _DELAYS if delay > self.best.delay)
        self._climb((replace(self.best, delay=delay) for delay in delays), patience=1)

    def _result_of(self, settings: Settings) -> _Result | None:
        if settings not in self.results:
            self.results[settings] = self._measure(settings)
        return self.results[settings]

    def _climb(
        self,
        candidates: Iterable[Settings],
        is_better: Callable[[_Result], bool] | None = None,
        patience: int = _PATIENCE,
    ) -> None:
        """Tries settings in their order, until several that follow each other are not better."""
        is_better = is_better or self._is_gain
        misses = 0
        for candidate in candidates:
            found = self._result_of(candidate)
            if found is not None and is_better(found):
                self.best = candidate
                misses = 0
                continue
            misses += 1
            if misses >= patience:
                return

    def _is_gain(self, found: _Result) -> bool:
        """Whether it is better than all that was measured, by more than noise."""
        others = [one for one in self.results.values() if one is not None and one is not found]
        if not others:
            return True
        top = max(others, key=lambda one: one.score)
        return found.score > top.score + max(_LEAST_GAIN, found.noise, top.noise) * abs(top.score)

    def _is_as_good(self, found: _Result) -> bool:
        """Whether it is about as good as the best that was measured."""
        top = max(one.score for one in self.results.values() if one is not None)
        return found.score >= top - (1 - _EQUAL) * abs(top)

    def _instances(self, numbers: Iterable[int]) -> Iterator[Settings]:
        for number in numbers:
            yield replace(self.best, instances=number)

    def _batches(self, sizes: Iterable[int]) -> Iterator[Settings]:
        sizes = (size if size == 1 else max(size, self._least_batch) for size in sizes)
        for size in dict.fromkeys(sizes):
            if size == 1:
                yield self.best.without_batching()
            elif size != self.best.batch:
                yield replace(self.best, max_batch_size=size, dynamic=True, preferred=())

    def _cheapest(self) -> Settings:
        """The settings with the fewest instances, the smallest delay, and the smallest batch."""
        best = self._result_of(self.best)
        if best is None:
            return self.best
        good = [
            settings
            for settings, result in self.results.items()
            if result is not None and result.score >= best.score - (1 - _EQUAL) * abs(best.score)
        ]
        return min(good, key=lambda one: (one.instances, one.delay, one.preferred, one.batch))


def _larger(number: int, most: int) -> Iterator[int]:
    while number < most:
        number = min(2 * number, most)
        yield number


def _smaller(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def highest_load(
    measure: Callable[[int], _Loaded], start: int, most: int, has_time: Callable[[], bool]
) -> _Loaded:
    """Returns the result with the highest rate whose latency is short enough.

    If the latency of one request at a time is too long, returns that.
    """
    low, too_much = start, most + 1
    best = measure(low)
    while not best.met and low > 1:
        low, too_much = max(1, low // 2), low
        best = measure(low)
    while best.met and has_time() and too_much - low > max(1, low // _PRECISION):
        if too_much > most:
            concurrency = min(math.ceil(1.5 * low), most)
        else:
            concurrency = (low + too_much) // 2
        found = measure(concurrency)
        if not found.met:
            too_much = concurrency
        elif found.rate > best.rate:
            low, best = concurrency, found
        else:
            break
    return best

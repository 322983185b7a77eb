"""The search for settings, on models whose rates are formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.tuning.search import Limits, Search, highest_load
from host.tuning.settings import Settings

LIMITS = Limits(instances=16, batch=64, batching=True)


@dataclass(frozen=True)
class Result:
    score: float
    noise: float = 0.01


def cpu_bound(settings: Settings) -> float:
    return 100.0 * min(settings.instances, 4) / (1 + 0.01 * max(0, settings.instances - 4))


def sleep_bound(settings: Settings) -> float:
    return 100.0 * settings.instances


def batch_friendly(settings: Settings) -> float:
    return min(settings.instances, 2) * settings.batch / (0.01 + 0.0005 * settings.batch)


def batch_hostile(settings: Settings) -> float:
    return min(settings.instances, 2) * 100.0 / math.sqrt(settings.batch)


def large_batches_only(settings: Settings) -> float:
    """Batches help, but those of two do not yet."""
    gain = 3.0 if settings.batch >= 4 else 1.0
    return min(settings.instances, 4) * 100.0 * gain


MODELS = [cpu_bound, sleep_bound, batch_friendly, batch_hostile, large_batches_only]


def best_of_all(rate: Callable[[Settings], float]) -> float:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    return max(
        rate(Settings(instances, batch, batch > 1))
        for instances, batch in product(range(1, 17), sizes)
    )


@pytest.mark.parametrize("rate", MODELS)
@settings(max_examples=25)
@given(
    start=st.sampled_from([1, 2, 5, 16]),
    batch=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 1000),
)
def test_it_ends_near_the_best_of_all_settings(
    rate: Callable[[Settings], float], start: int, batch: int, seed: int
) -> None:
    noise = random.Random(seed)

    def measure(settings: Settings) -> Result:
        return Result(rate(settings) * noise.uniform(0.99, 1.01))

    search = Search(Settings(start, batch, batch > 1), LIMITS, measure)
    assert rate(search.run()) >= 0.9 * best_of_all(rate)
    assert len(search.results) <= 40


def test_the_cheapest_of_equal_settings_is_chosen() -> None:
    search = Search(Settings(8, 16, True, 500, (16,)), LIMITS, lambda settings: Result(100.0))
    assert search.run().instances == 1
    assert search.best.delay == search.best.batch - 1 == 0


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("rate", MODELS)
def test_batches_that_clients_may_send_stay_allowed(
    rate: Callable[[Settings], float], dynamic: bool
) -> None:
    search = Search(Settings(1, 24, dynamic), LIMITS, lambda settings: Result(rate(settings)))
    search.run()
    assert min(settings.max_batch_size for settings in search.results) == 24


def test_settings_that_do_not_work_are_left_out() -> None:
    def measure(settings: Settings) -> Result | None:
        return Result(sleep_bound(settings)) if settings.instances <= 4 else None

    assert Search(Settings(), LIMITS, measure).run().instances == 4


def test_without_batches_only_instances_change() -> None:
    tried: list[Settings] = []

    def measure(settings: Settings) -> Result:
        tried.append(settings)
        return Result(cpu_bound(settings))

    limits = Limits(8, 64, batching=False)
    assert Search(Settings(), limits, measure).run() == Settings(4)
    assert all(settings == Settings(settings.instances) for settings in tried)


def test_it_ends_when_nothing_can_be_measured() -> None:
    search: Search[Result] = Search(Settings(2), LIMITS, lambda settings: None)
    assert search.run() == Settings(2)
    assert len(search.results) < 20


@dataclass(frozen=True)
class Loaded:
    concurrency: int
    met: bool
    rate: float


@pytest.mark.parametrize("start", [1, 3, 50, 400])
def test_the_highest_rate_within_a_latency_is_found(start: int) -> None:
    tried: list[int] = []

    def measure(concurrency: int) -> Loaded:
        """Four instances that need 10 ms each: more requests only wait."""
        tried.append(concurrency)
        rate = 100.0 * min(concurrency, 4)
        return Loaded(concurrency, concurrency / rate <= limit, rate)

    limit = 0.0101  # no request may wait
    assert highest_load(measure, start, 512, lambda: True).rate >= 300
    limit = 0.1  # 40 requests in flight
    assert highest_load(measure, start, 512, lambda: True).rate == 400
    assert len(tried) < 20
    limit = 0.001
    tried.clear()
    found = highest_load(measure, start, 512, lambda: True)
    assert (found.met, found.concurrency) == (False, 1)
    assert highest_load(measure, 8, 512, lambda: False).concurrency == 1
    limit, tried = math.inf, []
    assert highest_load(measure, 1, 1, lambda: True).concurrency == 1
    assert tried == [1]


@pytest.mark.parametrize("start", [1, 7, 100])
@given(edge=st.integers(1, 600))
def test_the_load_at_which_a_latency_is_reached_is_found_with_few_trials(
    start: int, edge: int
) -> None:
    tried: list[int] = []

    def measure(concurrency: int) -> Loaded:
        tried.append(concurrency)
        return Loaded(concurrency, concurrency <= edge, float(concurrency))

    found = highest_load(measure, start, 512, lambda: True)
    assert found.met
    assert min(edge, 512) * 8 / 9 - 1 <= found.concurrency <= edge
    assert len(tried) == len(set(tried)) <= 20

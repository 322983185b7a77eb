"""The buckets of latencies: each latency is in a bucket that is at most 6.25 % above it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as some

from host.cli.top import quantile
from host.metrics.latency import LatencyCounts, latency_buckets


@given(some.integers(1, 1 << 62))
def test_a_latency_is_just_below_the_bound_of_its_bucket(ns: int) -> None:
    counts = LatencyCounts()
    counts.add_latencies([ns])
    ((bound, count),) = latency_buckets(counts)
    assert count == 1
    assert ns / 1000 - 0.0011 <= bound <= ns / 1000 * 1.0626 + 0.0011


def test_a_latency_of_zero_and_a_negative_one_are_counted() -> None:
    counts = LatencyCounts()
    for ns in (0, -5):
        counts.add_latencies([ns])
    assert sum(count for _, count in latency_buckets(counts)) == 2


@given(some.lists(some.integers(1_000, 10_000_000_000), min_size=1, max_size=200))
def test_quantiles_are_those_of_the_values(values: list[int]) -> None:
    counts = LatencyCounts()
    for value in values:
        counts.add_latencies([value])
    values.sort()
    for wanted in (0.5, 0.99, 1.0):
        true = values[math.ceil(wanted * len(values)) - 1] / 1000
        found = quantile(latency_buckets(counts), wanted)
        assert true - 0.0011 <= found <= true * 1.0626 + 0.0011


def test_without_a_latency_there_is_no_quantile() -> None:
    assert math.isnan(quantile([], 0.5))
    assert math.isnan(quantile([(10.0, 0)], 0.5))

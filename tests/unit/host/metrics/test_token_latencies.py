"""The times between tokens, with a clock that the test sets."""

from __future__ import annotations

from host.config.schema import new_config
from host.metrics.catalogue import MetricsSnapshot
from host.metrics.family import Histogram
from host.metrics.model_metrics import ModelMetrics
from host.metrics.settings import MetricsSettings
from host.metrics.statistics import InferenceCounters
from host.metrics.token_latencies import (
    INTER_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TokenTimer,
    token_buckets,
)


def model_metrics() -> ModelMetrics:
    counters = InferenceCounters("m", "1")
    return ModelMetrics(new_config(), 1, counters, lambda: 0, MetricsSettings())


def names(metrics: ModelMetrics) -> set[str]:
    snapshot = MetricsSnapshot()
    metrics.collect_into(snapshot)
    return {family.name for family in snapshot.families()}


def test_a_timer_records_the_first_piece_and_the_times_between_pieces_of_each_choice() -> None:
    metrics, clock = model_metrics(), iter([12.0, 12.5, 13.0, 16.0])
    latencies = metrics.token_latencies
    timer = TokenTimer(latencies, 10.0, lambda: next(clock))
    for choice in (0, 1, 0, 0):
        timer.record_token(choice)
    first, between = latencies.time_to_first_token, latencies.inter_token
    assert (sum(first.counts), first.total) == (2, 2.0 + 2.5)
    assert (sum(between.counts), between.total) == (2, 1.0 + 3.0)


def test_a_model_that_streamed_no_text_has_no_token_latencies() -> None:
    metrics = model_metrics()
    assert not names(metrics) & {TIME_TO_FIRST_TOKEN, INTER_TOKEN}
    TokenTimer(metrics.token_latencies, 0.0).record_token(0)
    assert names(metrics) >= {TIME_TO_FIRST_TOKEN, INTER_TOKEN}


def test_a_reloaded_version_continues_the_token_latencies() -> None:
    old, new = model_metrics(), model_metrics()
    TokenTimer(old.token_latencies, 0.0).record_token(0)
    new.inherit_from(old)
    TokenTimer(new.token_latencies, 0.0).record_token(0)
    assert sum(new.token_latencies.time_to_first_token.counts) == 2


def test_buckets_are_those_up_to_the_last_one_in_use() -> None:
    histogram = Histogram((0.001, 0.005, 0.01))
    assert token_buckets(histogram) == []
    histogram.observe(0.002)
    assert token_buckets(histogram) == [(1000, 0), (5000, 1)]
    histogram.observe(7.0)  # no bucket is so large
    assert token_buckets(histogram) == [(1000, 0), (5000, 1), (10000, 1)]

"""Quantiles of the last minute, and the histogram of first responses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.config.schema import new_config
from host.inference.call import Call
from host.inference.request import InferRequest
from host.metrics.families import Histogram, MetricsSnapshot
from host.metrics.latency import (
    DEFAULT_QUANTILES,
    INTER_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Latencies,
    MetricsSettings,
    Summary,
    TokenTimer,
    first_response_bounds,
    token_buckets,
)
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import InferenceCounters


def test_counters_alone_are_on_by_default() -> None:
    assert MetricsSettings.from_texts([]) == MetricsSettings(
        True, False, False, DEFAULT_QUANTILES, ()
    )


def test_every_setting_can_be_changed() -> None:
    made = MetricsSettings.from_texts(
        [
            "counter_latencies=false",
            "summary_latencies=true",
            "histogram_latencies=true",
            "summary_quantiles=0.25:0.01,1:0",
        ]
    )
    assert made == MetricsSettings(False, True, True, (0.25, 1.0), ())


def test_the_last_value_of_a_repeated_setting_is_used() -> None:
    texts = ["summary_latencies=true", "summary_latencies=false"]
    assert not MetricsSettings.from_texts(texts).summary_latencies


@pytest.mark.parametrize("part", ["0.5", "a:b", "0.5:", ":0.1", "1.1:0.1", "0.5:-1", "nan:0.1"])
def test_a_malformed_quantile_is_skipped_with_a_warning(part: str) -> None:
    made = MetricsSettings.from_texts([f"summary_quantiles=0.1:0.01,{part}"])
    assert made.quantiles == (0.1,)
    (warning,) = made.warnings
    assert warning == (
        f"--metrics-config: ignoring '{part}' in summary_quantiles; expected"
        " <quantile>:<error>, both from 0 to 1"
    )


@pytest.mark.parametrize(
    ("part", "quantile"),
    [
        ("0.1:0.0.1", 0.1),
        ("0.5x:0.05", 0.5),
        ("0.5:0.1:0.2", 0.5),
        (" 0.9 : 0.01 ", 0.9),
        ("1e-1:1e-2x", 0.1),
        ("0x1p-1:0.1", 0.5),
        (".5e:+.1", 0.5),
    ],
)
def test_text_after_a_number_is_ignored(part: str, quantile: float) -> None:
    made = MetricsSettings.from_texts([f"summary_quantiles={part}"])
    assert (made.quantiles, made.warnings) == ((quantile,), ())


def test_without_a_valid_quantile_the_defaults_are_used() -> None:
    assert MetricsSettings.from_texts(["summary_quantiles=x"]).quantiles == DEFAULT_QUANTILES


def test_an_unknown_setting_gives_a_warning() -> None:
    assert MetricsSettings.from_texts(["volume=11"]).warnings == (
        "--metrics-config: setting 'volume' is not used by this version",
    )


@pytest.mark.parametrize(
    ("name", "default"),
    [("counter_latencies", True), ("summary_latencies", False), ("histogram_latencies", False)],
)
@pytest.mark.parametrize("value", ["maybe", "True", "1"])
def test_a_value_that_is_not_a_boolean_gives_a_warning_and_the_default(
    name: str, default: bool, value: str
) -> None:
    made = MetricsSettings.from_texts([f"{name}={value}"])
    assert getattr(made, name) is default
    used = str(default).lower()
    assert made.warnings == (
        f"--metrics-config: {name} must be true or false, got '{value}'; using {used}",
    )


QUANTILES = (0.0, 0.5, 0.9, 0.999, 1.0)


class Clock:
    """A clock that advances when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def filled(values: list[int], clock: Clock | None = None) -> Summary:
    summary = Summary(QUANTILES, clock or Clock())
    for value in values:
        summary.observe(value)
    return summary


def test_a_summary_without_observations_has_nan_quantiles() -> None:
    summary = filled([])
    assert (summary.count, summary.total) == (0, 0)
    assert [quantile for quantile, _ in summary.quantiles()] == list(QUANTILES)
    assert all(math.isnan(value) for _, value in summary.quantiles())


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=500))
def test_quantiles_are_exact(values: list[int]) -> None:
    summary = filled(values)
    assert (summary.count, summary.total) == (len(values), sum(values))
    ordered = sorted(values)
    for quantile, value in summary.quantiles():
        rank = quantile * len(values)
        around = {max(0, math.floor(rank) - 1), min(len(values), math.ceil(rank)) - 1, 0}
        assert value in {ordered[place] for place in around if quantile or place == 0}


def test_quantiles_cover_one_minute_and_sums_cover_everything() -> None:
    clock = Clock()
    summary = filled([1], clock)
    clock.now += 30
    summary.observe(100)
    assert dict(summary.quantiles())[0.0] == 1
    clock.now += 35
    assert dict(summary.quantiles())[0.0] == 100
    clock.now += 1_000_000
    assert math.isnan(dict(summary.quantiles())[0.5])
    assert (summary.count, summary.total) == (2, 101)


def test_quantiles_of_very_many_values_are_estimated_from_a_sample() -> None:
    summary = filled(list(range(100_000)))
    for quantile, value in summary.quantiles():
        # 8 standard deviations of a sample of 10,000
        assert value == pytest.approx(quantile * 100_000, abs=4_000)
    assert summary.count == 100_000


def test_values_of_sampled_slices_are_weighted_by_their_number() -> None:
    clock = Clock()
    summary = filled([1] * 30_000, clock)
    clock.now += 13
    for _ in range(10_000):
        summary.observe(2)
    assert dict(summary.quantiles())[0.5] == 1


# Latencies of a model


def test_disabled_summaries_and_histograms_do_not_exist() -> None:
    config = new_config()
    summaries = Latencies(config, MetricsSettings(summary_latencies=True))
    histograms = Latencies(config, MetricsSettings(histogram_latencies=True))
    for latencies in (summaries, histograms):
        latencies.record_success(5_000_999, 1_000, 2_000, 3_000, -1)
        latencies.record_first_response(Call(InferRequest("m", [])))
    assert summaries.request is not None and summaries.compute_output is not None
    assert (summaries.request.total, summaries.compute_output.total) == (5_000, 0)
    assert summaries.first_response is None
    assert histograms.request is None and histograms.first_response is not None
    assert sum(histograms.first_response.counts) == 1


def test_an_error_is_not_counted_as_first_response() -> None:
    latencies = Latencies(new_config(), MetricsSettings(histogram_latencies=True))
    call = Call(InferRequest("m", []))
    call.failed = True
    latencies.record_first_response(call)
    assert latencies.first_response is not None
    assert sum(latencies.first_response.counts) == 0


def test_a_model_may_set_the_buckets_of_the_first_response_histogram(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = new_config()
    assert first_response_bounds(config) == (100, 500, 2000, 5000)
    control = config.model_metrics.metric_control.add()
    control.metric_identifier.family = "nv_inference_first_response_histogram_ms"
    control.histogram_options.buckets.extend([10, 5])
    assert first_response_bounds(config) == (5, 10)
    assert not caplog.records
    config.model_metrics.metric_control.add().metric_identifier.family = "other"
    assert first_response_bounds(config) == (5, 10)
    assert caplog.messages == [
        "Metric family 'other' in 'metric_identifier' is not a customizable metric in Triton core."
    ]


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

"""Quantiles of the last minute, and the histogram of first responses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.config.schema import new_config
from host.inference.call import Call
from host.inference.request import InferRequest
from host.metrics.latency import Latencies, Summary, first_response_bounds
from host.metrics.settings import MetricsSettings

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

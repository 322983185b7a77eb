"""The two formats of a scrape: the text format as in Triton, and OpenMetrics."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_text

from host.metrics.exposition import number, render_exposition
from host.metrics.families import Histogram, MetricFamily, MetricKind, labels_of

OPEN_METRICS = "application/openmetrics-text"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"


def text(*families: MetricFamily, accept: str = "") -> str:
    return render_exposition(families, accept)[1].decode()


def histogram(*bounds: float) -> Histogram:
    made = Histogram(bounds)
    for value in (0.05, 1.5, 6.0):
        made.observe(value)
    return made


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, "0"),
        (1e6, "1000000"),
        (7.55, "7.55"),
        (-0.1, "-0.1"),
        (0.1 + 0.2, "0.3"),
        (123456.789, "123456.789"),
        (1e-7, "1e-07"),
        (1e16, "1e+16"),
        (2**63, "9223372036854775808"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "Nan"),
    ],
)
def test_numbers_are_written_as_triton_does(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_counter_is_written_with_a_line_per_series() -> None:
    family = MetricFamily("served", "how many", MetricKind.COUNTER)
    family.add((), 3)
    family.add(labels_of({"version": "1", "model": "m", "_tag": "t"}), 4.5)
    assert text(family) == (
        "# HELP served how many\n"
        "# TYPE served counter\n"
        "served 3\n"
        'served{_tag="t",model="m",version="1"} 4.5\n'
    )


def test_a_histogram_is_written_with_buckets_sum_and_count() -> None:
    family = MetricFamily("taken", "", MetricKind.HISTOGRAM)
    family.add_histogram((("k", "v"),), histogram(0.1, 1.0, 2.5))
    assert text(family) == (
        "# HELP taken \n"
        "# TYPE taken histogram\n"
        'taken_count{k="v"} 3\n'
        'taken_sum{k="v"} 7.55\n'
        'taken_bucket{k="v",le="0.1"} 1\n'
        'taken_bucket{k="v",le="1"} 1\n'
        'taken_bucket{k="v",le="2.5"} 2\n'
        'taken_bucket{k="v",le="+Inf"} 3\n'
    )


def test_a_summary_is_written_with_quantiles_sum_and_count() -> None:
    family = MetricFamily("took", "", MetricKind.SUMMARY)
    family.add_summary((("k", "v"),), 2, 30, [(0.5, 10.0), (1.0, math.nan)])
    assert text(family).splitlines()[2:] == [
        'took_count{k="v"} 2',
        'took_sum{k="v"} 30',
        'took{k="v",quantile="0.5"} 10',
        'took{k="v",quantile="1"} Nan',
    ]


def test_a_family_without_series_is_absent() -> None:
    empty = MetricFamily("empty", "h", MetricKind.GAUGE)
    assert text(empty) == ""
    assert b"empty" not in render_exposition([empty], "application/openmetrics-text")[1]


@given(value=st.text(), help=st.text())
def test_any_label_value_can_be_read_back(value: str, help: str) -> None:
    family = MetricFamily("name", help, MetricKind.GAUGE)
    family.add((("k", value),), 1)
    written = text(family)
    (sample,) = [s for f in read_text(written) for s in f.samples]
    assert sample.labels == {"k": value}


def test_invalid_unicode_does_not_break_the_scrape() -> None:
    family = MetricFamily("name", "", MetricKind.GAUGE)
    family.add((("k", "\ud800"),), 1)
    assert text(family).endswith('name{k="?"} 1\n')


# Choosing the format


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", TEXT_TYPE),
        ("*/*", TEXT_TYPE),
        ("text/plain", TEXT_TYPE),
        (OPEN_METRICS, OPEN_TYPE),
        (f"{OPEN_METRICS};version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2", OPEN_TYPE),
        (f"text/plain, {OPEN_METRICS};q=0.5", TEXT_TYPE),
        (f"{OPEN_METRICS};q=0", TEXT_TYPE),
        (f"{OPEN_METRICS};q=much", TEXT_TYPE),
        ("text/html, , ;", TEXT_TYPE),
    ],
)
def test_the_format_follows_the_accept_header(accept: str, kind: str) -> None:
    assert render_exposition([], accept)[0] == kind


# OpenMetrics


def families() -> list[MetricFamily]:
    """One family of each kind."""
    counter = MetricFamily("served", "h", MetricKind.COUNTER)
    counter.add((("k", "v"),), 3)
    total = MetricFamily("made_total", "h", MetricKind.COUNTER)
    total.add((), 4)
    gauge = MetricFamily("level", "a \\ b\nc", MetricKind.GAUGE)
    gauge.add((("k", 'a"b\\c\n'),), -1.5)
    taken = MetricFamily("taken", "h", MetricKind.HISTOGRAM)
    taken.add_histogram((("k", "v"),), histogram(0.1, 1.0))
    took = MetricFamily("took", "h", MetricKind.SUMMARY)
    took.add_summary((), 2, 30, [(0.5, 10.0)])
    return [counter, total, gauge, taken, took]


def test_the_reference_parser_reads_openmetrics() -> None:
    written = text(*families(), accept=OPEN_METRICS)
    assert written.endswith("# EOF\n")
    types = {family.name: family.type for family in read_open(written)}
    assert types == {
        "served": "unknown",
        "made": "counter",
        "level": "gauge",
        "taken": "histogram",
        "took": "summary",
    }


def test_every_series_has_the_same_name_in_both_formats() -> None:
    def series(text: str) -> set[str]:
        return {
            line.split(" ")[0].replace('"1.0"', '"1"')
            for line in text.splitlines()
            if not line.startswith("#")
        }

    assert series(text(*families())) == series(text(*families(), accept=OPEN_METRICS))


def test_a_counter_keeps_its_name_if_another_family_has_the_shorter_one() -> None:
    counter = MetricFamily("made_total", "h", MetricKind.COUNTER)
    counter.add((), 4)
    made = MetricFamily("made", "h", MetricKind.GAUGE)
    made.add((), 1)
    written = text(counter, made, accept=OPEN_METRICS)
    assert {f.name: f.type for f in read_open(written)} == {
        "made_total": "unknown",
        "made": "gauge",
    }


def test_a_histogram_with_negative_bounds_has_only_buckets_in_openmetrics() -> None:
    family = MetricFamily("taken", "h", MetricKind.HISTOGRAM)
    family.add_histogram((), histogram(-1.0, 1.0))
    written = text(family, accept=OPEN_METRICS)
    assert "taken_sum" not in written and "taken_count" not in written
    assert list(read_open(written))

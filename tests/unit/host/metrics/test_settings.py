"""Parsing `--metrics-config`."""

from __future__ import annotations

import pytest

from host.metrics.settings import DEFAULT_QUANTILES, MetricsSettings


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

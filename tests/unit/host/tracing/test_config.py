"""Parsing `--trace-config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.options.options import Options, UsageError
from host.tracing.config import TraceConfig

HERE = str(Path(__file__).parent)


def of(*settings: str) -> TraceConfig:
    return Options(model_repository=[HERE], trace_config=list(settings)).tracing


def test_tracing_is_off_by_default() -> None:
    made = of()
    assert (made.level, made.rate, made.count, made.mode, made.file) == (
        frozenset(), 1000, -1, "triton", "",
    )  # fmt: skip
    assert made.url == "http://localhost:4318/v1/traces"
    assert made.warnings == ()


def test_levels_accumulate_and_other_settings_use_the_last_value() -> None:
    made = of("level=timestamps", "level=TENSORS", "rate=1", "rate=2", "triton,file=f")
    assert (made.level, made.rate) == (frozenset({"TIMESTAMPS", "TENSORS"}), 2)


@pytest.mark.parametrize("word", ["true", "on", "MIN", "max", "TIMESTAMPS"])
def test_several_words_mean_timestamps(word: str) -> None:
    assert of(f"level={word}", "triton,file=f").level == {"TIMESTAMPS"}


@pytest.mark.parametrize(
    ("setting", "detail"),
    [
        ("rate=often", "Invalid option value. Got often"),
        ("rate=-1", "Provided option value is out of bound. Got -1"),
        ("count=-2147483649", "Provided option value is out of bound. Got -2147483649"),
        ("triton,log-frequency=x", "Invalid option value. Got x"),
        ("opentelemetry,bsp_schedule_delay=0", "Provided option value is out of bound. Got 0"),
    ],
    ids=["word", "negative", "count", "frequency", "delay"],
)
def test_numbers_are_checked(setting: str, detail: str) -> None:
    with pytest.raises(UsageError) as caught:
        of(setting)
    assert caught.value.detail == f'Bad option: "--trace-config".\n{detail}'


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (["level=true"], "requests are not traced: trace file name is not given"),
        (
            ["level=true", "triton,file=f", "rate=0"],
            "requests are not traced: sample rate must be non-zero",
        ),
        (
            ["level=tensors", "mode=opentelemetry"],
            "trace level TENSORS is not supported in mode opentelemetry",
        ),
        (
            ["colour=red"],
            "--trace-config: setting 'colour' of all modes is not used by this version",
        ),
        (
            ["triton,url=x"],
            "--trace-config: setting 'url' of mode triton is not used by this version",
        ),
    ],
    ids=["no file", "no rate", "tensors", "global", "of a mode"],
)
def test_a_setting_without_effect_gives_a_warning(settings: list[str], warning: str) -> None:
    assert Options(model_repository=[HERE], trace_config=settings).warnings == [warning]


def test_batch_settings_default_to_environment_variables() -> None:
    environment = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "7",
        "OTEL_BSP_SCHEDULE_DELAY": "8",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "many",
    }
    given = [("opentelemetry", "bsp_schedule_delay", "9")]
    assert TraceConfig.from_settings(given, environment).batching == {
        "bsp_max_queue_size": 7,
        "bsp_schedule_delay": 9,
        "bsp_max_export_batch_size": 512,
    }


def test_options_of_the_mode_are_described_in_order() -> None:
    made = of("mode=opentelemetry", "opentelemetry,resource=a=b=c", "opentelemetry,resource=d=e")
    assert made.resource == {"a": "b=c", "d": "e"}
    assert list(made.describe()) == [
        "url", "resource", "bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size",
    ]  # fmt: skip
    assert made.describe()["resource"] == "a=b=c,d=e"

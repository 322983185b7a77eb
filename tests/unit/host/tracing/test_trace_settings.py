"""Trace settings: their values, those of models, and updates by clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from host.errors import HostError
from host.options.options import Options, UsageError
from host.tracing.trace import Trace, TraceTree
from host.tracing.trace_settings import (
    OPENTELEMETRY,
    TENSORS,
    TIMESTAMPS,
    TraceConfig,
    TraceSettings,
)

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


ON = frozenset([TIMESTAMPS])


class RecordingSink:
    """Records the traces that are written and the settings that are flushed."""

    def __init__(self) -> None:
        self.written: list[TraceTree] = []
        self.flushed: list[Any] = []

    def write_tree(self, setting: Any, tree: TraceTree) -> None:
        self.written.append(tree)

    def flush_setting(self, setting: Any) -> None:
        self.flushed.append(setting)

    def close(self) -> None:
        """Nothing is left to write."""


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


def settings_with(sink: RecordingSink, **values: Any) -> TraceSettings:
    return TraceSettings(TraceConfig(**{"level": ON, "rate": 1, "file": "f", **values}), sink)


def trace(settings: TraceSettings, model: str, requests: int = 1) -> list[TraceTree]:
    """Sends requests to a model; returns the traces that are started."""
    trees = [settings.find(model).sample_request(forced=False) for _ in range(requests)]
    return [tree for tree in trees if tree is not None]


def described(settings: TraceSettings, model: str, name: str) -> str | list[str]:
    return settings.describe(model)[name]


def test_a_model_follows_the_global_setting_in_every_value_that_it_does_not_override(
    sink: RecordingSink,
) -> None:
    settings = settings_with(sink, rate=5)
    settings.update("m", {"rate": 2})
    settings.update("", {"level": frozenset([TENSORS]), "log_frequency": 7, "rate": 3})
    assert settings.describe("m") == {
        "trace_level": [TENSORS],
        "trace_rate": "2",
        "trace_count": "-1",
        "log_frequency": "7",
        "trace_file": "f",
        "trace_mode": "triton",
    }
    assert described(settings, "other", "trace_rate") == "3"


def test_a_cleared_model_value_follows_the_global_setting_again(sink: RecordingSink) -> None:
    settings = settings_with(sink, rate=5)
    settings.update("m", {"rate": 2, "log_frequency": 9})
    settings.update("m", {"rate": None})
    settings.update("", {"rate": 4})
    assert described(settings, "m", "trace_rate") == "4"
    assert described(settings, "m", "log_frequency") == "9"


def test_a_model_without_overrides_uses_the_global_setting_itself(sink: RecordingSink) -> None:
    settings = settings_with(sink)
    settings.update("m", {"rate": 2})
    assert settings.find("m") is not settings.find("")
    settings.update("m", {"rate": None})
    assert settings.find("m") is settings.find("")


def test_a_cleared_global_value_gets_its_initial_value_back(sink: RecordingSink) -> None:
    settings = settings_with(sink, rate=5, count=8)
    settings.update("m", {"log_frequency": 1})
    settings.update("", {"rate": 2, "count": 3})
    settings.update("", {"rate": None, "count": None})
    for model in ("", "m"):
        assert described(settings, model, "trace_rate") == "5"
        assert described(settings, model, "trace_count") == "8"


def test_an_overridden_count_keeps_what_is_left_of_it_when_other_values_change(
    sink: RecordingSink,
) -> None:
    settings = settings_with(sink)
    settings.update("", {"count": 10})
    settings.update("m", {"count": 5})
    assert len(trace(settings, "m", 2)) == 2
    assert len(trace(settings, "other", 3)) == 3
    settings.update("m", {"log_frequency": 1})
    assert described(settings, "m", "trace_count") == "3"
    settings.update("", {"log_frequency": 2})
    assert described(settings, "m", "trace_count") == "3"
    assert described(settings, "", "trace_count") == "7"
    assert len(trace(settings, "m", 9)) == 3


def test_a_new_count_starts_afresh(sink: RecordingSink) -> None:
    settings = settings_with(sink)
    settings.update("m", {"count": 5})
    trace(settings, "m", 2)
    settings.update("m", {"count": 5})
    assert described(settings, "m", "trace_count") == "5"


def test_a_new_model_setting_takes_over_what_is_left_of_the_global_count(
    sink: RecordingSink,
) -> None:
    settings = settings_with(sink, count=10)
    trace(settings, "m", 4)
    settings.update("m", {"rate": 1})
    assert described(settings, "m", "trace_count") == "6"
    trace(settings, "m", 2)
    assert described(settings, "m", "trace_count") == "4"
    assert described(settings, "", "trace_count") == "6"


def test_a_global_count_from_the_start_is_restored_by_any_global_change(
    sink: RecordingSink,
) -> None:
    settings = settings_with(sink, count=10)
    trace(settings, "", 4)
    settings.update("", {"log_frequency": 1})
    assert described(settings, "", "trace_count") == "10"


@pytest.mark.parametrize("model", ["", "m"])
@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        ({}, {"rate": 0}, "sample rate must be non-zero"),
        ({"file": "", "level": frozenset()}, {"level": ON}, "trace file name is not given"),
    ],
)
def test_an_invalid_change_is_refused_and_changes_nothing(
    sink: RecordingSink, model: str, config: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    settings = settings_with(sink, **config)
    before = settings.find(model)
    with pytest.raises(HostError) as error:
        settings.update(model, change)
    assert error.value.message == f"Attempting to set invalid trace setting :{reason}"
    assert settings.find(model) is before
    assert not sink.flushed


def test_in_mode_opentelemetry_a_rate_of_zero_is_allowed(sink: RecordingSink) -> None:
    settings = settings_with(sink, mode=OPENTELEMETRY, file="")
    settings.update("", {"rate": 0})
    assert settings.enabled
    assert trace(settings, "m") == []
    assert settings.find("m").sample_request(forced=True) is not None


def test_settings_are_enabled_while_any_scope_has_a_level(sink: RecordingSink) -> None:
    settings = settings_with(sink, level=frozenset())

    def is_enabled() -> bool:
        return settings.enabled

    assert not is_enabled()
    settings.update("m", {"level": ON})
    assert is_enabled()
    settings.update("m", {"level": None})
    assert not is_enabled()


def test_a_replaced_setting_is_flushed_once_its_traces_are_complete(sink: RecordingSink) -> None:
    settings = settings_with(sink)
    settings.update("m", {"rate": 1})
    old_model, old_global = settings.find("m"), settings.find("")
    (tree,) = trace(settings, "m")
    started = Trace(lambda trace: 1, tree)
    started.start_response()
    settings.update("", {"log_frequency": 1})
    assert sink.flushed == [old_global]  # the model's setting still has a trace
    started.finish_response()
    assert sink.written == [tree]
    assert sink.flushed == [old_global, old_model]


def test_after_retire_all_nothing_is_enabled_and_every_setting_is_flushed(
    sink: RecordingSink,
) -> None:
    settings = settings_with(sink)
    settings.update("m", {"rate": 1})
    settings.retire_all()
    assert not settings.enabled
    assert sink.flushed == [settings.find("m"), settings.find("")]

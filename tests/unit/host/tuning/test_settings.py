"""Settings that are tuned: read from a configuration, and written into its text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.config.pbtxt import parse_pbtxt
from host.errors import HostError
from host.tuning.settings import Settings, check_text, edit_text

TEXTS = {
    "nothing": "",
    "no newline at the end": 'backend: "python"',
    "on one line": """\
max_batch_size: 8 # of requests { [
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
""",
    "on many lines": """\
# A comment with "quotes" and a { bracket.
name: "a { name"
instance_group {
  # why two
  count: 2
  kind: KIND_CPU
}
max_batch_size:
  8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]  # input
dynamic_batching {
  # the delay was measured
  max_queue_delay_microseconds: 100  # microseconds
  preferred_batch_size: 4
  preferred_batch_size: 8
}
# the end
""",
    "with other brackets": """\
instance_group: < count: 2 >, max_batch_size: 8;
dynamic_batching: <preferred_batch_size: [4,8], max_queue_delay_microseconds: 100>
parameters { key: "dynamic_batching" value { string_value: "max_batch_size: 8 }" } }
""",
    "without a count": """\
max_batch_size: 4
instance_group [
  {
    kind: KIND_CPU
  }
]
dynamic_batching {}
""",
}


def settings_of(text: str) -> Settings:
    config = parse_pbtxt(text, "config.pbtxt")
    batching = config.dynamic_batching
    return Settings(
        (config.instance_group[0].count or 1) if config.instance_group else 1,
        config.max_batch_size,
        config.HasField("dynamic_batching"),
        batching.max_queue_delay_microseconds,
        tuple(batching.preferred_batch_size),
    )


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    numbers = st.integers(1, 100)
    plain = Settings(draw(numbers), draw(numbers))
    if draw(st.booleans()):
        return plain
    preferred = tuple(draw(st.lists(numbers, max_size=3)))
    return Settings(plain.instances, plain.max_batch_size, True, draw(numbers), preferred)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@settings(max_examples=25)
@given(after=any_settings())
def test_a_text_gets_other_settings_and_keeps_all_else(text: str, after: Settings) -> None:
    edited = edit_text(text, settings_of(text), after, "config.pbtxt")
    assert settings_of(edited) == after
    check_text(edited, "config.pbtxt", settings_of(text), after)
    comments = re.findall(r"^ *#.*|  #.*", text, re.MULTILINE)
    assert all(comment.strip() in edited for comment in comments)
    before, now = parse_pbtxt(text, ""), parse_pbtxt(edited, "")
    for config in (before, now):
        for group in config.instance_group:
            group.ClearField("count")
        for name in ("max_batch_size", "dynamic_batching"):
            config.ClearField(name)
    if not before.instance_group:
        now.ClearField("instance_group")
    assert before == now


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_with_the_same_settings_is_unchanged(text: str) -> None:
    assert edit_text(text, settings_of(text), settings_of(text), "config.pbtxt") == text


def test_only_the_lines_of_the_settings_change() -> None:
    text = TEXTS["on many lines"]
    after = Settings(3, 16, True, 500, (16,))
    assert edit_text(text, settings_of(text), after, "config.pbtxt") == (
        text.replace("count: 2", "count: 3")
        .replace("  8\ninput", "  16\ninput")
        .replace("microseconds: 100", "microseconds: 500")
        .replace("  preferred_batch_size: 4\n  preferred_batch_size: 8\n", "")
        .replace("dynamic_batching {\n", "dynamic_batching {\n  preferred_batch_size: [ 16 ]\n")
    )


def test_a_text_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(HostError, match="config.pbtxt: line 1"):
        edit_text("max_batch_size: ${size}", Settings(), Settings(max_batch_size=2), "config.pbtxt")
    with pytest.raises(HostError, match="cannot be edited"):
        check_text("", "config.pbtxt", Settings(), Settings(7))


def test_settings_that_only_the_completed_configuration_has_may_be_missing_in_the_text() -> None:
    before = Settings.of({"max_batch_size": 8, "dynamic_batching": {"preferred_batch_size": [8]}})
    assert before == Settings(1, 8, True)  # the server fills in the size of full batches
    for text in ("", "max_batch_size: 8\ndynamic_batching { }\n"):
        after = Settings(4, 8, True, 500)
        edited = edit_text(text, before, after, "config.pbtxt")
        check_text(edited, "config.pbtxt", before, after)
        assert "preferred" not in edited
        assert ("max_batch_size" in edited) == bool(text)


def test_a_preferred_size_of_full_batches_goes_with_the_size_of_batches() -> None:
    text = "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 8 ] }\n"
    edited = edit_text(text, Settings(1, 8, True), Settings(1, 16, True), "config.pbtxt")
    assert settings_of(edited) == Settings(1, 16, True)


def test_settings_are_read_from_a_configuration_and_applied_to_it() -> None:
    config = {
        "name": "x",
        "max_batch_size": 8,
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
        "dynamic_batching": {"max_queue_delay_microseconds": "100", "preserve_ordering": True},
    }
    read = Settings.of(config)
    assert read == Settings(2, 8, True, 100)
    assert read.apply(config)["dynamic_batching"] == {
        "max_queue_delay_microseconds": 100,
        "preferred_batch_size": [],
        "preserve_ordering": True,
    }
    assert "dynamic_batching" not in read.without_batching().apply(config)
    assert Settings(3).apply({"name": "y"})["instance_group"] == [{"count": 3}]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"instance_group": [{}, {}]}, "2 instance groups"),
        ({"sequence_batching": {}}, "sequence batcher"),
        ({"ensemble_scheduling": {}}, "ensemble"),
    ],
)
def test_models_that_cannot_be_tuned_are_refused(config: dict[str, object], text: str) -> None:
    with pytest.raises(HostError, match=text):
        Settings.of(config)

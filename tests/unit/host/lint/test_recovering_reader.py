"""The recovering reader finds all errors, and only errors that the loader finds too."""

from __future__ import annotations

import random

import pytest

from host.config.pbtxt import parse_pbtxt
from host.config.schema import new_config
from host.errors import HostError
from host.lint.recovering_reader import RecoveringReader

WHOLE = """\
backend: "python"  # a comment
max_batch_size: 8
input [ { name: "x", data_type: TYPE_FP32, dims: [ -1, 3 ] }, { name: "n" dims: 1 } ]
output < name: "y"; data_type: TYPE_INT32; dims: 1 dims: 2 >
dynamic_batching { preferred_batch_size: [ 4, 8 ] preserve_ordering: true }
parameters { key: "A" value { string_value: "a" } }
instance_group { count: 2 kind: KIND_CPU }
"""


def read(text: str) -> RecoveringReader:
    reader = RecoveringReader(text)
    reader.read_all(new_config().DESCRIPTOR)
    return reader


def mended(text: str) -> str:
    """The repaired text, which must be a valid configuration."""
    repaired = read(text).repaired
    assert repaired is not None
    parse_pbtxt(repaired, "config.pbtxt")
    return " ".join(repaired.split())


def test_a_text_without_errors_is_not_changed() -> None:
    reader = read(WHOLE)
    assert (reader.problems, reader.guessed, reader.repaired) == ([], set(), WHOLE)


def test_every_error_is_found_with_position_field_and_suggestion() -> None:
    text = """\
max_batch_sise: 4
input { name: "x" data_type: TYPE_FLOAT32 dims: "1" }
output { name: "y" datatype: FP32 }
dynamic_batching 5
priority: [ 1, { } ]
instance_group { count: ${N} kind "KIND_CPU" gpus: [ 1 2 ] }
"""
    found = read(text).problems
    assert [(p.position, p.field, p.hint) for p in found if "priority" not in p.field] == [
        ((1, 1), "max_batch_sise", "did you mean 'max_batch_size'?"),
        ((2, 30), "input[0].data_type", "did you mean 'TYPE_FP32'?"),
        ((2, 49), "input[0].dims[0]", ""),
        ((3, 20), "output[0].datatype", "did you mean 'data_type'?"),
        ((3, 30), "output[0].data_type", "did you mean 'TYPE_FP32'?"),
        ((4, 18), "dynamic_batching", ""),
        ((6, 25), "instance_group[0].count", ""),
        ((6, 35), "instance_group[0].kind", ""),
        ((6, 35), "instance_group[0].kind", "did you mean 'KIND_CPU'?"),
        ((6, 56), "instance_group[0].gpus", ""),
    ]
    assert [p.field for p in found if "priority" in p.field] == ["priority"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_sise: 4", "max_batch_size: 4"),
        ("what_is_this { a: [1, { }] } name: 'm'", "name: 'm'"),
        ("what_is_this: 5, name: 'm'", "name: 'm'"),
        ("name: 'm' } ] backend: 'python'", "name: 'm' backend: 'python'"),
        ("${ALL} name: 'm'", "name: 'm'"),
        ("input { data_type: FP32 }", "input { data_type: TYPE_FP32 }"),
        ("input { dims: [ 1 2 ] }", "input { dims: [ 1 , 2 ] }"),
        ("input { dims: [ 1, what ] }", "input { dims: [ 1, 0 ] }"),
        ("name: 'm' name: 'n' backend 'python'", "name: 'm' backend : 'python'"),
        ("dynamic_batching { } sequence_batching { oldes { } }", "dynamic_batching { }"),
    ],
    ids=lambda value: None,
)
def test_a_repaired_text_has_the_suggested_corrections(text: str, expected: str) -> None:
    assert mended(text) == expected


def test_errors_inside_a_refused_part_are_found() -> None:
    found = read("dynamic_batching { } sequence_batching { oldes { } }").problems
    assert [problem.field for problem in found] == ["sequence_batching", "sequence_batching.oldes"]


def test_fields_with_unknown_values_are_listed_as_guessed() -> None:
    reader = read("max_batch_size: ${N} instance_group { count: many kind: TYPO }")
    assert reader.guessed == {
        "max_batch_size",
        "instance_group[0].count",
        "instance_group[0].kind",
    }


def test_a_variable_in_a_string_is_reported_and_is_not_an_error() -> None:
    text = 'parameters { key: "A" value { string_value: "${HOME}/$$KEPT/$${X}" } }'
    reader = read(text)
    assert (reader.problems, reader.repaired) == ([], text)
    (left,) = reader.leftovers
    assert left.position == (1, 45)
    assert left.text == "template variable '${HOME}' was not replaced"


@pytest.mark.parametrize("opening", ["a {", "a: [", "input { reshape { b <", "{", "<"])
def test_deep_nesting_is_accepted(opening: str) -> None:
    reader = read(opening * 5000)
    assert reader.problems
    assert reader.repaired is None


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_an_error_exactly_where_the_loader_does(
    seed: int,
) -> None:
    chance = random.Random(seed)
    scraps = [*"{}[],:;<>\"'#\n/é\0", "${X}", "$x", "foo", "5", "-1", "nan", "dims", "input"]
    for _ in range(60):
        text = WHOLE
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(text))
            text = text[:start] + chance.choice(scraps) + text[start + chance.choice((0, 1, 5)) :]
        reader = read(text)
        try:
            parse_pbtxt(text, "config.pbtxt")
        except HostError as error:
            assert reader.problems, f"only the loader refuses {text!r}: {error.message}"
            assert str(reader.problems[0]) in error.message
        else:
            assert not reader.problems, f"only the check refuses {text!r}"
        if reader.repaired is not None:
            parse_pbtxt(reader.repaired, "config.pbtxt")

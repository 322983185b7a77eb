"""Template variables of configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.config.model_config import load_config
from host.config.template import fill_known_variables, fill_template, parse_assignments
from host.errors import ErrorCode, HostError

VALUES = {"count": "2", "path": "/models/a", "empty": "", "again": "${count}"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("count: ${count}", "count: 2"),
        ('a: "${path}/${path}x" b: ${count}', 'a: "/models/a//models/ax" b: 2'),
        ("# ${unknown}\na: '#${count}' # ${count}", "# ${unknown}\na: '#2' # ${count}"),
        ('a: "${empty}" b: "${again}"', 'a: "" b: "${count}"'),
        ('a: "$${count} $$TRITON_MODEL_DIRECTORY $count"',
         'a: "${count} $$TRITON_MODEL_DIRECTORY $count"'),
    ],
)  # fmt: skip
def test_variables_are_replaced_once_outside_of_comments(text: str, filled: str) -> None:
    assert fill_template(text, VALUES, "config.pbtxt") == filled


@pytest.mark.parametrize(
    ("text", "line", "column", "name"),
    [
        ('name: "m"\n  count: ${counts}', 2, 10, "counts"),
        ('a: "${path}" b: "${later}" c: "${last}"', 1, 18, "later"),
        ('a: "${path:-x}"', 1, 5, "path:-x"),
    ],
)
def test_a_variable_without_a_value_is_an_error_with_its_position(
    text: str, line: int, column: int, name: str
) -> None:
    with pytest.raises(HostError) as caught:
        fill_template(text, VALUES, "config.pbtxt")
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"failed to read text proto from config.pbtxt: line {line}, column {column}: template"
        f" variable '${{{name}}}' has no value, set it with --set {name}=VALUE"
    )


def test_a_check_keeps_what_has_no_value_and_escapes() -> None:
    text = "a: ${count} b: ${unknown} c: '$${count}'"
    assert fill_known_variables(text, VALUES) == "a: 2 b: ${unknown} c: '$${count}'"


def test_a_file_of_values_has_one_assignment_per_line() -> None:
    lines = ["# values", "", "a=1", " b =x = y ", "a=2", "c="]
    assert parse_assignments(lines) == {"a": "2", "b": "x = y ", "c": ""}


@pytest.mark.parametrize("line", ["a", "=1", "a b=1", "1a=1"])
def test_a_line_that_is_no_assignment_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=f"^line 2: expected NAME=VALUE, got '{line}'$"):
        parse_assignments(["a=1", line])


def test_a_configuration_is_read_with_its_values(tmp_path: Path) -> None:
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: 1 }'
    text = f'backend: "python" input {tensor} output {tensor} max_batch_size: ${{count}}'
    (tmp_path / "config.pbtxt").write_text(text)
    assert load_config(tmp_path, strict=False, variables=VALUES).config.max_batch_size == 2
    with pytest.raises(HostError, match=r"template variable '\$\{count\}' was not replaced"):
        load_config(tmp_path, strict=False)

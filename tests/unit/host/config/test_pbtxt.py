"""Reading config.pbtxt: accepted texts, and errors with their positions."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.config.model_config import ConfigSettings, load_config
from host.config.pbtxt import (
    fill_known_variables,
    fill_template,
    parse_assignments,
    parse_pbtxt,
    parse_pbtxt_with_source,
    to_pbtxt,
)
from host.errors import ErrorCode, HostError


def error_text(text: str) -> str:
    with pytest.raises(HostError) as caught:
        parse_pbtxt(text, "models/m/config.pbtxt")
    assert caught.value.code is ErrorCode.INTERNAL
    start = "failed to read text proto from models/m/config.pbtxt: "
    assert caught.value.message.startswith(start)
    return caught.value.message.removeprefix(start)


def test_every_spelling_of_the_text_format_is_accepted() -> None:
    config = parse_pbtxt(
        """
        # a comment
        name: "one " 'two'
        max_batch_size: 0x10,
        input [ { name: "a" data_type: 11 dims: [ -1, 3 ] }, < name: "b" dims: 1 dims: 2 > ];
        input: { name: "c", optional: t }
        response_cache { enable: 1 } model_transaction_policy { decoupled: False }
        parameters { key: "k" value: { string_value: "first" } }
        parameters: { key: "k" value { string_value: "last" } }
        """,
        "config.pbtxt",
    )
    assert config.name == "one two"
    assert config.max_batch_size == 16
    assert [tensor.name for tensor in config.input] == ["a", "b", "c"]
    assert config.input[0].data_type == 11
    assert list(config.input[0].dims) == [-1, 3]
    assert list(config.input[1].dims) == [1, 2]
    assert config.input[2].optional
    assert config.response_cache.enable
    assert not config.model_transaction_policy.decoupled
    assert config.parameters["k"].string_value == "last"


def test_windows_line_endings_are_accepted() -> None:
    config = parse_pbtxt('name: "m" # c\r\nmax_batch_size: 2\r\n', "config.pbtxt")
    assert (config.name, config.max_batch_size) == ("m", 2)


def test_an_empty_text_is_an_empty_configuration() -> None:
    assert parse_pbtxt("", "config.pbtxt") == parse_pbtxt("# nothing\n", "config.pbtxt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'name: "m"\n  max_batchsize: 4',
            (
                "line 2, column 3: unknown field 'max_batchsize' in ModelConfig, "
                "did you mean 'max_batch_size'?"
            ),
        ),
        (
            'input { name: "a" dim: 1 }',
            (
                "line 1, column 19: unknown field 'dim' in ModelInput, "
                "did you mean 'dims'? (field 'input[0]')"
            ),
        ),
        (
            "response_cache { zzz: 1 }",
            (
                "line 1, column 18: unknown field 'zzz' in ModelResponseCache, "
                "expected one of enable (field 'response_cache')"
            ),
        ),
    ],
)
def test_an_unknown_field_is_reported_with_its_message_and_a_suggestion(
    text: str, expected: str
) -> None:
    assert error_text(text) == expected


@pytest.mark.parametrize(
    ("kind", "suggestion"),
    [
        ("KIND_GPUS", ", did you mean 'KIND_GPU'?"),
        ("cpu", ", did you mean 'KIND_CPU'?"),
        ("kind_cpu", ", did you mean 'KIND_CPU'?"),
        ('"KIND_CPU"', ", did you mean 'KIND_CPU'?"),
        ("zzz", ""),
        ("99", ""),
    ],
)
def test_an_invalid_enum_value_is_reported_with_the_valid_values(
    kind: str, suggestion: str
) -> None:
    assert error_text(f"instance_group {{ kind: {kind} }}") == (
        "line 1, column 24: field 'instance_group[0].kind' of ModelInstanceGroup: expected one of "
        f"KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, got {kind!r}{suggestion}"
    )


@pytest.mark.parametrize("written", ["BYTES", "TYPE_BYTES", "string"])
def test_type_bytes_gets_the_suggestion_type_string(written: str) -> None:
    assert error_text(f"input {{ data_type: {written} }}").endswith("did you mean 'TYPE_STRING'?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "max_batch_size: ${size}",
            (
                "line 1, column 17: field 'max_batch_size' of ModelConfig: "
                "template variable '${size}' was not replaced, expected int32"
            ),
        ),
        (
            'max_batch_size: "${size}"',
            (
                "line 1, column 17: field 'max_batch_size' of ModelConfig: "
                "template variable '${size}' was not replaced, expected int32"
            ),
        ),
        (
            "instance_group [ { count: $count } ]",
            (
                "line 1, column 27: field 'instance_group[0].count' of ModelInstanceGroup: "
                "template variable '$count' was not replaced, expected int32"
            ),
        ),
        (
            "input { data_type: ${type} }",
            (
                "line 1, column 20: field 'input[0].data_type' of ModelInput: "
                "template variable '${type}' was not replaced, expected one of "
            ),
        ),
        (
            "\n${everything}",
            (
                "line 2, column 1: template variable '${everything}' was not replaced, "
                "expected a field of ModelConfig"
            ),
        ),
    ],
)
def test_a_template_variable_that_was_not_replaced_is_reported(text: str, expected: str) -> None:
    assert error_text(text).startswith(expected)


def test_a_dollar_sign_inside_a_string_is_accepted() -> None:
    text = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$DIR/${env}.tar" } }'
    config = parse_pbtxt(text, "config.pbtxt")
    assert config.parameters["EXECUTION_ENV_PATH"].string_value == "$$DIR/${env}.tar"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "max_batch_size: eight",
            "line 1, column 17: field 'max_batch_size' of ModelConfig: expected int32, got 'eight'",
        ),
        (
            "max_batch_size: 3000000000",
            (
                "line 1, column 17: field 'max_batch_size' of ModelConfig: "
                "expected int32 from -2147483648 to 2147483647, got '3000000000'"
            ),
        ),
        (
            "backend: python",
            (
                "line 1, column 10: field 'backend' of ModelConfig: "
                "expected a quoted string, got 'python'"
            ),
        ),
        (
            'name: "m\n',
            "line 1, column 7: field 'name' of ModelConfig: expected a quoted string, got '\"m'",
        ),
        (
            "response_cache { enable: yes }",
            (
                "line 1, column 26: field 'response_cache.enable' of ModelResponseCache: "
                "expected true or false, got 'yes'"
            ),
        ),
        (
            "sequence_batching { direct { minimum_slot_utilization: half } }",
            (
                "line 1, column 56: field 'sequence_batching.direct.minimum_slot_utilization' of "
                "StrategyDirect: expected float, got 'half'"
            ),
        ),
        (
            "max_batch_size { }",
            "line 1, column 16: field 'max_batch_size' of ModelConfig: expected ':', got '{'",
        ),
        (
            "input: 5",
            "line 1, column 8: field 'input[0]' of ModelConfig: expected '{', got '5'",
        ),
        (
            "input { dims: [ 1 2 ] }",
            "line 1, column 19: field 'input[0].dims' of ModelInput: expected ',' or ']', got '2'",
        ),
        (
            "input { dims: [",
            (
                "line 1, column 16: field 'input[0].dims[0]' of ModelInput: "
                "expected int64, got the end of the text"
            ),
        ),
        ("\ninput {", "line 2, column 7: field 'input[0]' is not closed, expected '}'"),
        ("}", "line 1, column 1: expected a field of ModelConfig, got '}'"),
        (
            'name: "a"\nmax_batch_size: 0 max_batch_size: 1',
            (
                "line 2, column 19: field 'max_batch_size' of ModelConfig is given twice, "
                "first at line 2, column 1"
            ),
        ),
        (
            "input { reshape {} reshape {} }",
            (
                "line 1, column 20: field 'reshape' of ModelInput (field 'input[0]') is given "
                "twice, first at line 1, column 9"
            ),
        ),
        (
            "dynamic_batching {}\nsequence_batching {}",
            (
                "line 2, column 1: fields 'dynamic_batching' and 'sequence_batching' of "
                "ModelConfig are both given, expected one scheduling_choice, "
                "first at line 1, column 1"
            ),
        ),
    ],
)
def test_a_syntax_error_has_the_position_the_field_and_the_expected_token(
    text: str, expected: str
) -> None:
    assert error_text(text) == expected


def test_the_old_name_of_a_field_is_an_unknown_field() -> None:
    assert "unknown field 'generative_sequence' in ModelSequenceBatching" in error_text(
        "sequence_batching { generative_sequence: true }"
    )


def test_every_field_has_its_position() -> None:
    _, source = parse_pbtxt_with_source(
        """name: "m"
input [ { name: "a" dims: [1, 2] },
        { name: "b" dims: 3 } ]
input { name: "c" }
parameters { key: "K" value { string_value: "v" } }
dynamic_batching { priority_queue_policy { key: 3 value { } } }
""",
        "config.pbtxt",
    )
    assert source.position("name") == (1, 1)
    assert source.position("input") == (2, 1)
    assert source.position("input[0]") == (2, 9)
    assert source.position("input[0].dims") == (2, 21)
    assert source.position("input[0].dims[1]") == (2, 31)
    assert source.position("input[1].name") == (3, 11)
    assert source.position("input[2].name") == (4, 9)
    assert source.position("parameters[K]") == (5, 1)
    assert source.position("dynamic_batching.priority_queue_policy[3]") == (6, 20)


def test_a_missing_field_has_the_position_of_its_parent() -> None:
    _, source = parse_pbtxt_with_source('input { name: "a" }', "config.pbtxt")
    assert (
        source.format_location("input[0].dims[2]")
        == " (config.pbtxt:1:1, field 'input[0].dims[2]')"
    )
    assert source.format_location("output[0].dims") == " (config.pbtxt, field 'output[0].dims')"


def test_a_changed_field_has_no_position() -> None:
    _, source = parse_pbtxt_with_source('input { name: "a" }\nname: "m"', "config.pbtxt")
    assert source.without_fields(["input"]).position("input[0].name") is None
    assert source.without_fields(["input"]).position("name") == (2, 1)


def test_a_configuration_is_printed_in_the_order_of_the_schema() -> None:
    text = 'max_batch_size: 4 backend: "python" name: "m"'
    assert to_pbtxt(parse_pbtxt(text, "c")) == 'name: "m"\nbackend: "python"\nmax_batch_size: 4\n'


@pytest.mark.parametrize(
    ("written", "meant"),
    [("TYPE_FLOAT", "TYPE_FP32"), ("TYPE_BYTES", "TYPE_STRING"), ("double", "TYPE_FP64")],
)
def test_another_name_of_a_data_type_gets_a_suggestion(written: str, meant: str) -> None:
    with pytest.raises(HostError, match=f"did you mean '{meant}'"):
        parse_pbtxt(f"input {{ data_type: {written} }}", "config.pbtxt")


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
    assert load_config(tmp_path, ConfigSettings(variables=VALUES)).config.max_batch_size == 2
    with pytest.raises(HostError, match=r"template variable '\$\{count\}' was not replaced"):
        load_config(tmp_path, ConfigSettings())

"""The JSON form: which fields are printed in which order, and which JSON is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host.config.defaults import normalise_config
from host.config.instance_groups import normalise_instance_groups
from host.config.json_form import from_json, to_dict, to_json
from host.config.pbtxt import parse_pbtxt, to_pbtxt
from host.config.schema import INTEGER_RANGES, Field, field_kind, is_map, is_repeated, new_config
from host.errors import ErrorCode, HostError

DEFAULT_MODEL = (
    '{"name":"m","platform":"","backend":"python","runtime":"","version_policy":{"latest":'
    '{"num_versions":1}},"max_batch_size":0,"input":[],"output":[],"batch_input":[],'
    '"batch_output":[],"optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":'
    '{"enable":true},"output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,'
    '"eager_batching":false},"instance_group":[{"name":"m","kind":"KIND_CPU","count":1,"gpus":[],'
    '"secondary_devices":[],"profile":[],"passive":false,"host_policy":""}],'
    '"default_model_filename":"model.py","cc_model_filenames":{},"metric_tags":{},'
    '"parameters":{},"model_warmup":[]}'
)


def test_the_default_model_prints_as_documented() -> None:
    config = parse_pbtxt('name: "m" backend: "python" default_model_filename: "model.py"', "c")
    normalise_config(config)
    normalise_instance_groups(config)
    assert to_json(config) == DEFAULT_MODEL


def test_dynamic_batching_is_printed_between_optimization_and_instance_groups() -> None:
    config = parse_pbtxt("max_batch_size: 4 dynamic_batching {}", "c")
    normalise_config(config)
    form = to_dict(config)
    keys = list(form)
    place = keys.index("dynamic_batching")
    assert keys[place - 1 : place + 2] == ["optimization", "dynamic_batching", "instance_group"]
    assert json.dumps(form["dynamic_batching"], separators=(",", ":")) == (
        '{"preferred_batch_size":[4],"max_queue_delay_microseconds":0,"preserve_ordering":false,'
        '"priority_levels":0,"default_priority_level":0,"priority_queue_policy":{}}'
    )


def test_a_tensor_prints_all_settings_but_reshape_only_if_it_is_set() -> None:
    text = 'input { name: "a" data_type: TYPE_FP32 dims: [-1, 3] }'
    text += ' output { name: "b" reshape { shape: [] } }'
    form = to_dict(parse_pbtxt(text, "c"))
    assert json.dumps(form["input"], separators=(",", ":")) == (
        '[{"name":"a","data_type":"TYPE_FP32","format":"FORMAT_NONE","dims":[-1,3],'
        '"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,'
        '"is_non_linear_format_io":false}]'
    )
    assert json.dumps(form["output"], separators=(",", ":")) == (
        '[{"name":"b","data_type":"TYPE_INVALID","dims":[],"reshape":{"shape":[]},'
        '"label_filename":"","is_shape_tensor":false,"is_non_linear_format_io":false}]'
    )


def test_the_set_member_of_a_oneof_is_printed_even_if_false() -> None:
    config = parse_pbtxt(
        "sequence_batching { state { initial_state { zero_data: false } initial_state {} } }", "c"
    )
    states = to_dict(config)["sequence_batching"]["state"][0]["initial_state"]
    assert [list(state) for state in states] == [
        ["data_type", "dims", "zero_data", "name"],
        ["data_type", "dims", "name"],
    ]


def test_64_bit_fields_are_numbers_except_those_that_triton_prints_as_strings() -> None:
    config = parse_pbtxt(
        """
        version_policy { specific { versions: 9007199254740993 } }
        instance_group { secondary_devices { device_id: 3 } }
        optimization { cuda { graph_spec {
            input { key: "a" value { dim: 4 } }
            graph_lower_bound { input { key: "b" value { dim: 5 } } } } } }
        model_warmup { inputs { key: "i" value { dims: 6 } } }
        sequence_batching { state { dims: 7 initial_state { dims: 8 } } }
        """,
        "c",
    )
    form = to_dict(config)
    assert form["version_policy"]["specific"]["versions"] == [9007199254740993]
    assert form["instance_group"][0]["secondary_devices"][0]["device_id"] == "3"
    graph = form["optimization"]["cuda"]["graph_spec"][0]
    assert graph["input"]["a"]["dim"] == ["4"]
    assert graph["graph_lower_bound"]["input"]["b"]["dim"] == ["5"]
    assert form["model_warmup"][0]["inputs"]["i"]["dims"] == [6]
    state = form["sequence_batching"]["state"][0]
    assert state["dims"] == [7]
    assert state["initial_state"][0]["dims"] == ["8"]


def test_keys_of_a_map_are_strings_and_sorted() -> None:
    config = parse_pbtxt(
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 5 } "
        "priority_queue_policy { key: 2 value {} } priority_queue_policy { key: 1 value {} } }",
        "c",
    )
    form = to_dict(config)["dynamic_batching"]
    assert list(form["priority_queue_policy"]) == ["1", "2"]
    assert form["default_queue_policy"]["default_timeout_microseconds"] == 5


def test_numbers_are_printed_with_as_few_digits_as_possible() -> None:
    config = parse_pbtxt(
        "sequence_batching { direct { minimum_slot_utilization: 0.1 } } model_metrics { "
        "metric_control { histogram_options { buckets: [0.1, inf] } } }",
        "c",
    )
    form = to_dict(config)
    assert form["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.1
    options = form["model_metrics"]["metric_control"][0]["histogram_options"]
    assert options["buckets"] == [0.1, "Infinity"]


def test_whole_numbers_are_printed_without_a_fraction() -> None:
    """The text equals Triton's, because a model may compare it."""
    config = parse_pbtxt(
        "sequence_batching { direct {} control_input { name: 's' control "
        "{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 2] } } } model_metrics { "
        "metric_control { histogram_options { buckets: [-3, -0.0, 1e15, 1e20] } } }",
        "c",
    )
    text = to_json(config)
    assert '"direct":{"max_queue_delay_microseconds":0,"minimum_slot_utilization":0}' in text
    assert '"fp32_false_true":[0,2]' in text
    assert '"buckets":[-3,-0.0,1000000000000000.0,1e+20]' in text


def test_json_accepts_every_spelling_that_protobuf_allows() -> None:
    config = from_json(
        '{"name":"m","maxBatchSize":"4","input":[{"name":"a","data_type":"type_fp32",'
        '"dims":["-1",3]}],"instance_group":[{"kind":"Kind_Cpu"},{"kind":2}],'
        '"versionPolicy":{"specific":{"versions":["9007199254740993"]}},"optimization":null,'
        '"dynamic_batching":{"priority_queue_policy":{"1":{"timeout_action":"delay"}}}}'
    )
    assert config == parse_pbtxt(
        """
        name: "m" max_batch_size: 4
        input { name: "a" data_type: TYPE_FP32 dims: [-1, 3] }
        instance_group [ { kind: KIND_CPU }, { kind: KIND_CPU } ]
        version_policy { specific { versions: 9007199254740993 } }
        dynamic_batching { priority_queue_policy { key: 1 value { timeout_action: DELAY } } }
        """,
        "c",
    )
    assert from_json({"name": "m"}).name == "m"


@pytest.mark.parametrize(
    "value", ["plain", "it's", 'say "x"', """it's "x" """, "a\\b", "", "{': 1"]
)
def test_json_accepts_the_text_of_a_python_dict(value: str) -> None:
    config = {"name": "m", "parameters": {"k": {"string_value": value}}, "max_batch_size": 4}
    assert from_json(str(config)) == from_json(config)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ('{"instance_group":{"count":2}}', "instance_group { count: 2 }"),
        ('{"instance_group":{}}', "instance_group { }"),
        ('{"instance_group":null,"input":[null]}', ""),
        (
            '{"instance_group":[[{"count":2}],null,[[{"count":3}]]]}',
            "instance_group { count: 2 } instance_group { count: 3 }",
        ),
        ('{"instance_group":{"gpus":1,"profile":"a"}}', 'instance_group { gpus: 1 profile: "a" }'),
        (
            '{"input":{"dims":"1","reshape":{"shape":2}},"output":{"dims":[[1,null],2]}}',
            "input { dims: 1 reshape { shape: 2 } } output { dims: [1, 2] }",
        ),
        (
            '{"sequence_batching":{"control_input":{"control":{"int32_false_true":0}}}}',
            "sequence_batching { control_input { control { int32_false_true: 0 } } }",
        ),
        (
            '{"model_warmup":{"inputs":{"I":{"dims":1},"J":null}},"metric_tags":{"a":null}}',
            """model_warmup { inputs { key: "I" value { dims: 1 } } inputs { key: "J" value { } } }
            metric_tags { key: "a" value: "" }""",
        ),
        (
            '{"dynamic_batching":{"preferred_batch_size":4,"preserve_ordering":"true"}}',
            "dynamic_batching { preferred_batch_size: 4 preserve_ordering: true }",
        ),
        ('{"input":{"data_type":"8"}}', "input { data_type: TYPE_INT32 }"),
        ('{"max_batch_size":4,"input":[{"dims":[1,],},],}', "max_batch_size: 4 input { dims: 1 }"),
        ('{max_batch_size:4,"input":{ dims :1}}', "max_batch_size: 4 input { dims: 1 }"),
        ('{"name":"a,}\\tb:c\t"}', r'name: "a,}\tb:c\t"'),
    ],
)
def test_json_accepts_what_triton_accepts(form: str, expected: str) -> None:
    assert from_json(form) == parse_pbtxt(expected, "config.pbtxt")


def test_python_literals_that_are_not_json_are_refused_with_their_position() -> None:
    with pytest.raises(HostError) as caught:
        from_json(str({"name": "m", "dynamic_batching": None}))
    assert caught.value.message == (
        "failed to parse model configuration JSON: Expecting value: line 1 column 35 (char 34);"
        " json.dumps writes a Python dict as JSON, str does not"
    )


@pytest.mark.parametrize("end", ["", "\\", "'"])
def test_unclosed_quotes_are_refused_in_linear_time(end: str) -> None:
    with pytest.raises(HostError, match="failed to parse model configuration JSON"):
        from_json("{'" + '\\"' * 500_000 + end)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            '{"max_batchsize":1}',
            (
                "failed to parse model configuration JSON: unknown field 'max_batchsize' in "
                "ModelConfig, did you mean 'max_batch_size'?"
            ),
        ),
        (
            '{"input":[{},{"dim":1}]}',
            (
                "failed to parse model configuration JSON: unknown field 'dim' in ModelInput, "
                "did you mean 'dims'? (field 'input[1]')"
            ),
        ),
        (
            '{"parameters":{"k":{"stringvalue":""}}}',
            (
                "failed to parse model configuration JSON: unknown field 'stringvalue' in "
                "ModelParameter, did you mean 'string_value'? (field 'parameters[k]')"
            ),
        ),
        (
            '{"instance_group":[{"kind":"gpu"}]}',
            (
                "failed to parse model configuration JSON: field 'instance_group[0].kind': "
                "expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, got 'gpu', "
                "did you mean 'KIND_GPU'?"
            ),
        ),
        (
            '{"max_batch_size":1,"maxBatchSize":2}',
            (
                "failed to parse model configuration JSON: field 'max_batch_size' of ModelConfig "
                "is given twice"
            ),
        ),
        ("[]", "model configuration must be a JSON object, got []"),
    ],
)
def test_an_error_in_json_names_the_field(form: str, expected: str) -> None:
    with pytest.raises(HostError) as caught:
        from_json(form)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == expected


@pytest.mark.parametrize(
    "form",
    [
        "{",
        '{"name":1}',
        '{"name":"\\ud800"}',
        '{"max_batch_size":3000000000}',
        '{"max_batch_size":1.5}',
        '{"input":1}',
        '{"input":""}',
        '{"input":[1]}',
        '{"input":{"dims":{}}}',
        '{"input":{"dims":true}}',
        '{"max_batch_size":[4]}',
        '{"dynamic_batching":[{}]}',
        '{"dynamic_batching":{"preserve_ordering":1}}',
        '{"parameters":{"k":[{}]}}',
        '{"parameters":[{"key":"k","value":{}}]}',
        '{"name":"m",,}',
        '{"name":m}',
        '{"na-me":"m"}',
        '{"optimization":[]}',
        '{"parameters":[]}',
        '{"instance_group":[{"kind":99}]}',
        '{"instance_group":[{"kind":true}]}',
        '{"instance_group":[{"kind":[]}]}',
        '{"dynamic_batching":{"priority_queue_policy":{"x":{}}}}',
        '{"dynamic_batching":{},"sequence_batching":{}}',
        pytest.param('{"name":' + "[" * 100_000, id="bottomless"),
    ],
)
def test_json_that_does_not_fit_the_schema_is_refused(form: str) -> None:
    with pytest.raises(HostError) as caught:
        from_json(form)
    assert caught.value.code is ErrorCode.INVALID_ARG


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def values(field: Field) -> st.SearchStrategy[Any]:
    name = field_kind(field)
    if name == "message":
        return messages(field.message_type)
    if name == "enum":
        return st.sampled_from([value.number for value in field.enum_type.values])
    if name in INTEGER_RANGES:
        return st.integers(*INTEGER_RANGES[name])
    if name in ("float", "double"):
        return st.floats(allow_nan=False, width=32 if name == "float" else 64)
    return st.booleans() if name == "bool" else TEXT


def contents(field: Field) -> st.SearchStrategy[Any]:
    if is_map(field):
        entry = field.message_type.fields_by_name
        return st.dictionaries(values(entry["key"]), values(entry["value"]), max_size=2)
    return st.lists(values(field), max_size=2) if is_repeated(field) else values(field)


@st.composite
def messages(draw: st.DrawFn, descriptor: Any) -> Any:
    """A dictionary from field name to value, with at most one member of every oneof."""
    names = [field.name for field in descriptor.fields]
    chosen = draw(st.sets(st.sampled_from(names), max_size=4)) if names else set()
    taken: set[str] = set()
    result = {}
    for field in descriptor.fields:
        choice = field.containing_oneof.name if field.containing_oneof is not None else field.name
        if field.name in chosen and choice not in taken:
            taken.add(choice)
            result[field.name] = draw(contents(field))
    return result


def fill(message: Any, content: dict[str, Any]) -> Any:
    for name, value in content.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        target = getattr(message, name)
        if is_map(field):
            for key, element in value.items():
                if isinstance(element, dict):
                    fill(target[key], element)
                else:
                    target[key] = element
        elif field_kind(field) != "message":
            target.extend(value) if is_repeated(field) else setattr(message, name, value)
        elif is_repeated(field):
            for element in value:
                fill(target.add(), element)
        else:
            target.SetInParent()
            fill(target, value)
    return message


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages(new_config().DESCRIPTOR))
def test_conversion_to_text_and_json_and_back_loses_nothing(content: dict[str, Any]) -> None:
    config = fill(new_config(), content)
    read = parse_pbtxt(to_pbtxt(config), "config.pbtxt")
    assert read == config
    assert from_json(to_json(read)) == config
    assert from_json(to_dict(read)) == config
    assert to_json(from_json(to_json(read))) == to_json(config)

"""Every documented error of a configuration, with its exact text and its field."""

from __future__ import annotations

import logging

import pytest

from host.config.defaults import normalise_config
from host.config.findings import raise_first
from host.config.pbtxt import parse_pbtxt, parse_pbtxt_with_source
from host.config.validate import check_config, check_tensors
from host.errors import ErrorCode, HostError

PYTHON = 'name: "m" backend: "python" '
ENSEMBLE = 'name: "m" platform: "ensemble" '
TWO_LISTS = "int32_false_true: [0, 1] fp32_false_true: [0, 1]"
CACHE = "response_cache { enable: true } "
LISTS = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
ALL_LISTS = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
SET_BACKEND = 'set the backend, for example backend: "python"'
DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def error_text(text: str) -> str:
    """The text without its position, after checking that there is one."""
    config, source = parse_pbtxt_with_source(text, "models/m/config.pbtxt")
    with pytest.raises(HostError) as placed:
        raise_first(check_config(config), source)
        raise_first(check_tensors(config), source)
    with pytest.raises(HostError) as bare:
        raise_first(check_config(config), None)
        raise_first(check_tensors(config), None)
    assert bare.value.code is placed.value.code is ErrorCode.INVALID_ARG
    start, place = bare.value.message, " (models/m/config.pbtxt"
    assert placed.value.message.startswith(start.partition("; set the backend")[0] + place)
    return start


def accepted(text: str) -> None:
    config, source = parse_pbtxt_with_source(text, "config.pbtxt")
    raise_first(check_config(config), source)
    raise_first(check_tensors(config), source)


def control(*settings: str) -> str:
    """A sequence batcher with one control tensor per setting."""
    tensors = (
        f'control_input {{ name: "c{i}" control {{ {text} }} }}' for i, text in enumerate(settings)
    )
    return f"{PYTHON} sequence_batching {{ {' '.join(tensors)} }}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "model configuration must specify 'name'"),
        ('name: "m"', f"unexpected platform type '' for m; {SET_BACKEND}"),
        ('name: "m" platform: "x"', f"unexpected platform type 'x' for m; {SET_BACKEND}"),
        (
            ENSEMBLE + 'backend: "python"',
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        *(
            (
                f'name: "m" backend: "{backend}" platform: "{platform}"',
                f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}",
            )
            for backend, platform in [
                ("pytorch", "libtorch"),
                ("pytorch", ""),
                ("onnxruntime", "tensorrt_plan"),
                ("tensorrt", "x"),
                ("tensorflow", ""),
            ]
        ),
        (PYTHON + "max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        (
            ENSEMBLE,
            "ensemble scheduling must be set for ensemble m whose platform is ensemble",
        ),
        (
            PYTHON + CACHE + "model_transaction_policy { decoupled: true }",
            (
                "Response Cache does not currently support model m with 'decoupled' transaction "
                "policy. Please disable the response cache."
            ),
        ),
        (
            PYTHON + "model_metrics { metric_control {} }",
            "metric control must specify 'metric_identifier'",
        ),
        (
            PYTHON + "model_metrics { metric_control { metric_identifier {} } }",
            "metric identifier must specify non-empty 'family'",
        ),
        (
            PYTHON + 'model_metrics { metric_control { metric_identifier { family: "f" } } }',
            "metric control must specify 'histogram_options'",
        ),
        (
            PYTHON + 'model_metrics { metric_control { metric_identifier { family: "f" } '
            "histogram_options {} } }",
            "histogram options must specify non-empty 'buckets'",
        ),
    ],
)
def test_checks_of_names_platform_and_batch_size(text: str, expected: str) -> None:
    assert error_text(text) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("preferred_batch_size: 0", "dynamic batching preferred size must be positive for m"),
        (
            "preferred_batch_size: [4, 5]",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        ("priority_levels: 2", "default priority level must be in range [1, 2] for m"),
        (
            "priority_levels: 2 default_priority_level: 3",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 0 }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 preserve_ordering: true",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            (
                "preserve_ordering: true default_queue_policy { timeout_action: DELAY "
                "default_timeout_microseconds: 1 }"
            ),
            (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                "true for m"
            ),
        ),
        (
            (
                "preserve_ordering: true priority_queue_policy { key: 1 value { timeout_action: "
                "DELAY default_timeout_microseconds: 1 } }"
            ),
            (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is "
                "true for m"
            ),
        ),
    ],
)
def test_checks_of_dynamic_batching(settings: str, expected: str) -> None:
    text = f"{PYTHON} max_batch_size: 4 dynamic_batching {{ {settings} }}"
    assert error_text(text) == expected


def test_delay_without_timeout_may_preserve_the_order() -> None:
    accepted(
        PYTHON + "dynamic_batching { preserve_ordering: true priority_levels: 1 "
        "default_priority_level: 1 default_queue_policy { timeout_action: DELAY } }"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            PYTHON + CACHE + "sequence_batching {}",
            (
                "Response Cache does not currently support model m with sequence batching "
                "scheduler. Please disable the response cache."
            ),
        ),
        (
            PYTHON + "sequence_batching { control_input {} }",
            "sequence batching control tensor must have a name for m",
        ),
        (
            PYTHON
            + 'sequence_batching { control_input { name: "c" } control_input { name: "c" } }',
            "sequence batching control tensor 'c' is specified for multiple control kinds for m",
        ),
        (
            control("int32_false_true: [0, 1]", "int32_false_true: [0, 1]"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            control(""),
            f"sequence batching must specify either {LISTS} for CONTROL_SEQUENCE_START for m",
        ),
        (
            control(f"kind: CONTROL_SEQUENCE_END {TWO_LISTS}"),
            (
                f"sequence batching specifies more than one from {ALL_LISTS} "
                "for CONTROL_SEQUENCE_END for m"
            ),
        ),
        *(
            (
                control(f"kind: CONTROL_SEQUENCE_READY {name}: {value}"),
                (
                    f"sequence batching control '{name}' must have exactly 2 entries for "
                    "CONTROL_SEQUENCE_READY for m"
                ),
            )
            for name, value in [
                ("int32_false_true", "[0, 1, 2]"),
                ("fp32_false_true", "1"),
                ("bool_false_true", "true"),
            ]
        ),
        (
            control("kind: CONTROL_SEQUENCE_CORRID int32_false_true: [0, 1]"),
            f"sequence batching must not specify either {LISTS} for CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
            (
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data "
                "types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            ),
        ),
        (
            PYTHON + "sequence_batching { oldest { preferred_batch_size: 0 } }",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            PYTHON + "sequence_batching { oldest { preferred_batch_size: 1 } }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        *(
            (
                PYTHON + f"sequence_batching {{ direct {{ minimum_slot_utilization: {value} }} }}",
                "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
            )
            for value in (-0.1, 1.5)
        ),
    ],
)
def test_checks_of_sequence_batching(text: str, expected: str) -> None:
    assert error_text(text) == expected


def test_one_control_tensor_may_have_several_kinds() -> None:
    accepted(
        PYTHON
        + 'sequence_batching { control_input { name: "c" control { int32_false_true: [0, 1] }'
        "control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } } }"
    )


def step(inputs: str, outputs: str, model: str = "x") -> str:
    """`"a b"` maps the ensemble tensors a and b to inputs or outputs i0 and i1 of the model."""
    maps = [("input_map", inputs.split()), ("output_map", outputs.split())]
    entries = (
        f'{field} {{ key: "i{i}" value: "{tensor}" }}'
        for field, tensors in maps
        for i, tensor in enumerate(tensors)
    )
    name = f'model_name: "{model}" ' if model else ""
    return f"step {{ {name}{' '.join(entries)} }}"


def ensemble(inputs: str, outputs: str, *steps: str) -> str:
    tensors = [f'input {{ name: "{t}" data_type: TYPE_FP32 dims: 1 }}' for t in inputs.split()]
    tensors += [f'output {{ name: "{t}" data_type: TYPE_FP32 dims: 1 }}' for t in outputs.split()]
    return f"{ENSEMBLE}{' '.join(tensors)} ensemble_scheduling {{ {' '.join(steps)} }} "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            PYTHON + "ensemble_scheduling {}",
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            ensemble("", "") + "instance_group {}",
            "instance group should not be specified for ensemble 'm'",
        ),
        (
            ensemble("", "") + "optimization {}",
            "optimization should not be specified for ensemble 'm'",
        ),
        (
            ensemble("", "") + "model_warmup {}",
            "model_warmup can not be specified for ensemble 'm'",
        ),
        (ensemble("", ""), "must specify 'step' for ensemble 'm'"),
        (
            ensemble("a", "b", step("a", "b", model="")),
            "must specify 'model_name' in step 0 of ensemble 'm'",
        ),
        (
            ensemble("a", "b", step("a", "b"), step("", "c")),
            "must specify 'input_map' in step 1 of ensemble 'm'",
        ),
        (
            ensemble("a", "b", step("a", "")),
            "must specify 'output_map' in step 0 of ensemble 'm'",
        ),
        (
            ensemble("a", "b", step("a", "b"), step("a", "b")),
            "ensemble tensor 'b' can appear in an output map only once for ensemble 'm' step 1",
        ),
        (
            ensemble("a z", "b", step("a", "b")),
            "ensemble input 'z' for ensemble m' is not used",
        ),
        (
            ensemble("a", "b z", step("a", "b")),
            "ensemble output 'z' for ensemble m' is not used",
        ),
        (
            ensemble("a", "b", step("a u", "b")),
            (
                "output 'b' for ensemble 'm' is not written: at least one of its depending "
                "tensors, 'u', is not connected"
            ),
        ),
        (
            ensemble("a", "b u", step("a u", "b")),
            (
                "output 'b' for ensemble 'm' is not written: at least one of its depending "
                "tensors, 'u', is not connected"
            ),
        ),
        (
            ensemble("a", "b", step("a", "one"), step("onee", "two"), step("two", "b")),
            (
                "output 'b' for ensemble 'm' is not written: at least one of its depending "
                "tensors, 'onee', is not connected"
            ),
        ),
        (
            ensemble("a", "b", step("c", "d"), step("d", "c"), step("a d", "b")),
            (
                "output 'b' for ensemble 'm' is not written: at least one of its depending "
                "tensors, 'c', is not connected"
            ),
        ),
        (
            ensemble("a", "b", step("b", "c"), step("a c", "b")),
            "output 'b' for ensemble 'm' is not written",
        ),
        (
            ensemble("a", "b", step("c", "d"), step("d", "e"), step("a", "b")),
            "ensemble tensor 'c' is unused in ensemble 'm'",
        ),
        (
            ensemble("a", "b", step("d", "c"), step("c d", "d"), step("a", "b")),
            "ensemble tensor 'c' is unused in ensemble 'm'",
        ),
        (
            ensemble("a", "u b", step("a u", "b")),
            "output 'u' for ensemble 'm' is not written",
        ),
        (
            ensemble("a", "b", step("a", "b c")),
            "ensemble tensor 'c' is unused in ensemble 'm'",
        ),
    ],
)
def test_checks_of_ensembles(text: str, expected: str) -> None:
    assert error_text(text) == expected


def test_a_complete_ensemble_is_accepted() -> None:
    accepted(ensemble("a b", "d", step("a", "c"), step("c b", "d")))


def tensor(settings: str, which: str = "input") -> str:
    return f'{PYTHON} {which} {{ name: "t" data_type: TYPE_FP32 {settings} }}'


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", "must specify 'dims'"),
        (
            "dims: 1 reshape {}",
            "cannot have empty reshape for non-batching model as scalar tensors are not supported",
        ),
        ("dims: [1, 0]", f"dimension {DIMENSION}"),
        ("dims: [1, -2]", f"dimension {DIMENSION}"),
        ("dims: 1 reshape { shape: 0 }", f"reshape dimensions {DIMENSION}"),
        ("dims: [2, 3] reshape { shape: 5 }", "has different size for dims and reshape"),
        ("dims: [-1, 2] reshape { shape: 2 }", "has different size for dims and reshape"),
        ("dims: 2 reshape { shape: [-1, 2] }", "has different size for dims and reshape"),
        (
            "dims: [-1, -1] reshape { shape: [-1, 2] }",
            "has different number of variable-size dimensions for dims and reshape",
        ),
        (
            "dims: [2, -1, 4] reshape { shape: [4, -1, 2] }",
            "has different size for dims and reshape",
        ),
    ],
)
def test_checks_of_inputs_and_outputs(which: str, settings: str, expected: str) -> None:
    assert error_text(tensor(settings, which)) == f"model {which} 't' {expected} for m"


def test_an_empty_reshape_has_one_element() -> None:
    assert error_text(tensor("dims: 2 reshape {}") + "max_batch_size: 1") == (
        "model input 't' has different size for dims and reshape for m"
    )


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_tensor_needs_a_name_and_a_type(which: str) -> None:
    assert error_text(f"{PYTHON} {which} {{ }}") == f"model {which} must specify 'name' for m"
    assert error_text(f'{PYTHON} {which} {{ name: "t" }}') == (
        f"model {which} 't' must specify 'data_type' for m"
    )


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("dims: 1 is_shape_tensor: true", "shape tensors are only supported for TensorRT platform"),
        (
            "dims: 1 is_non_linear_format_io: true",
            "Non-linear IO format is only supported for the TensorRT platform",
        ),
        (
            "dims: [4294967296, 4294967296]",
            "element count for tensor 't dims' exceeds maximum size of 9223372036854775807",
        ),
    ],
)
def test_checks_of_tensorrt_tensor_settings(which: str, settings: str, expected: str) -> None:
    assert error_text(tensor(settings, which)) == f"{expected} for m"


@pytest.mark.parametrize("which", ["input", "output"])
def test_non_linear_formats_need_three_dimensions(which: str) -> None:
    text = (
        f'name: "m" backend: "tensorrt" platform: "tensorrt_plan" {which} {{ name: "t" '
        "data_type: TYPE_FP32 dims: 1 is_shape_tensor: true is_non_linear_format_io: true }"
    )
    assert error_text(text) == f"Non-linear IO format {which} requires 3 dims for m"


@pytest.mark.parametrize("form", ["FORMAT_NHWC", "FORMAT_NCHW"])
def test_image_formats_need_three_dimensions(form: str) -> None:
    expected = "model input NHWC/NCHW require 3 dims for m"
    assert error_text(tensor(f"format: {form} dims: [1, 2]")) == expected


@pytest.mark.parametrize(
    "settings",
    [
        "dims: [-1, 2, -1] reshape { shape: [-1, 1, 2, -1] }",
        "dims: [2, 3] reshape { shape: 6 }",
        "dims: [1] reshape {}",
        "dims: -1",
        "dims: [1, 1] reshape {}",
        "dims: [3, 4, 5] format: FORMAT_NHWC",
    ],
)
def test_valid_tensors_are_accepted(settings: str) -> None:
    accepted(tensor(settings) + " max_batch_size: 2")


TENSORS = PYTHON + (
    'input { name: "i" data_type: TYPE_FP32 dims: 1 }'
    'output { name: "o" data_type: TYPE_FP32 dims: 1 }'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "batch_input { kind: BATCH_ITEM_SHAPE }",
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 0",
        ),
        (
            'batch_input { source_input: "i" data_type: TYPE_INT64 }',
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
        ),
        (
            'batch_input { source_input: "x" data_type: TYPE_INT32 }',
            "unknown source input name 'x'",
        ),
        (
            'batch_output { source_input: ["i", "i"] }',
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 2",
        ),
        ('batch_output { source_input: "x" }', "unknown source input name 'x'"),
        (
            'batch_output { source_input: "i" target_name: "x" }',
            "unknown target output name 'x'",
        ),
        (
            'batch_output { source_input: "i" target_name: ["o", "o"] }',
            "target output name 'o' can only be specified once",
        ),
    ],
)
def test_checks_of_batch_inputs_and_outputs(text: str, expected: str) -> None:
    assert error_text(TENSORS + text) == f"{expected} for m"


def test_two_batch_outputs_may_have_the_same_target() -> None:
    accepted(TENSORS + 2 * 'batch_output { source_input: "i" target_name: "o" } ')


def test_a_default_python_model_is_valid() -> None:
    config = parse_pbtxt(PYTHON, "c")
    normalise_config(config)
    raise_first(check_config(config), None)
    raise_first(check_tensors(config), None)


def test_a_metric_that_cannot_be_customised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_pbtxt(
        PYTHON + 'model_metrics { metric_control { metric_identifier { family: "f" } '
        "histogram_options { buckets: 1 } } }",
        "c",
    )
    with caplog.at_level(logging.WARNING, "pbhost"):
        raise_first(check_config(config), None)
    assert caplog.messages == [
        "Metric family 'f' in 'metric_identifier' is not a customizable metric in Triton core."
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("max_batch_size: -1", "3:1, field 'max_batch_size'"),
        ("  dynamic_batching {\n preferred_batch_size: [9] }", ("4:25, field "
         "'dynamic_batching.preferred_batch_size[0]'")),
        ("response_cache { enable: true }\nmodel_transaction_policy { decoupled: true }",
         "3:18, field 'response_cache.enable'"),
        ('input [ { name: "a" data_type: TYPE_BOOL dims: 1 },\n { name: "b" } ]',
         "4:2, field 'input[1].data_type'"),
        ('input { name: "a" data_type: TYPE_BOOL dims: [\n1,\n 0 ] }',
         "5:2, field 'input[0].dims[1]'"),
    ],
)  # fmt: skip
def test_an_error_ends_with_the_position_of_its_field(text: str, place: str) -> None:
    config, source = parse_pbtxt_with_source(
        f'name: "m"\nbackend: "python"\n{text}', "p/config.pbtxt"
    )
    with pytest.raises(HostError) as caught:
        raise_first(check_config(config), source)
        raise_first(check_tensors(config), source)
    assert caught.value.message.endswith(f" (p/config.pbtxt:{place})")

"""Compares docs/reference/configuration.md with the fields of the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host.config.auto_complete import complete_config
from host.config.model_config import ConfigSettings, load_config
from host.config.pbtxt import parse_pbtxt
from host.config.schema import new_config
from host.errors import HostError
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "configuration.md").read_text()
ROW = r"^\| (`[^|]*`) \| (?:(honoured|refused|without effect) )?\| ([^\n]*) \|$"
ROWS = re.findall(ROW, PAGE, re.MULTILINE)
STATUSES = {name: status for names, status, _ in ROWS for name in re.findall(r"`([\w.]+)`", names)}


def fields(message: Any, path: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """The paths of all fields. A message that is used in several places is listed in the first."""
    for field in message.fields:
        name = f"{path}{field.name}"
        yield name
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or inner.full_name in above:
            continue
        yield from fields(inner, f"{name}.", (*above, inner.full_name))


SAME = {
    "dynamic_batching.priority_queue_policy.": "dynamic_batching.default_queue_policy.",
    "optimization.cuda.graph_spec.graph_lower_bound.input.": "optimization.cuda.graph_spec.input.",
    "optimization.execution_accelerators.cpu_execution_accelerator.": (
        "optimization.execution_accelerators.gpu_execution_accelerator."
    ),
}
"""Places with the same message: the page lists its fields once."""


def documented(name: str) -> str:
    for place, first in SAME.items():
        name = name.replace(place, first) if name.startswith(place) else name
    return name


FIELDS = list(fields(new_config().DESCRIPTOR))


def test_the_page_lists_exactly_the_fields_of_the_schema() -> None:
    assert {documented(name) for name in FIELDS} == set(STATUSES)


def test_each_field_is_listed_once() -> None:
    named = [name for names, _, _ in ROWS for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) == len(set(named))


def test_every_field_that_is_not_honoured_has_a_reason() -> None:
    assert all(reason.strip() for _, status, reason in ROWS if status != "honoured")


def read(tmp_path: Path, text: str) -> Any:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").touch()
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "python" {text}')
    return complete_config(load_config(tmp_path / "m", ConfigSettings()))


SHAPE_TENSOR = "shape tensors are only supported for TensorRT platform for m"
NOT_LINEAR = "Non-linear IO format is only supported for the TensorRT platform for m"
REFUSED = {
    "input.is_shape_tensor": (
        'input { name: "a" data_type: TYPE_BOOL dims: 1 is_shape_tensor: true }',
        SHAPE_TENSOR,
    ),
    "input.is_non_linear_format_io": (
        'input { name: "a" data_type: TYPE_BOOL dims: [1, 1, 1] is_non_linear_format_io: true }',
        NOT_LINEAR,
    ),
    "output.is_shape_tensor": (
        'output { name: "a" data_type: TYPE_BOOL dims: 1 is_shape_tensor: true }',
        SHAPE_TENSOR,
    ),
    "output.is_non_linear_format_io": (
        'output { name: "a" data_type: TYPE_BOOL dims: [1, 1, 1] is_non_linear_format_io: true }',
        NOT_LINEAR,
    ),
    "instance_group.profile": (
        'instance_group { profile: "1" }',
        (
            "instance group m_0 of model m and platform specifies profile field which is only"
            " supported for TensorRT models"
        ),
    ),
}


def test_every_refused_field_has_a_sample() -> None:
    refused = [
        n
        for n, status, why in ROWS
        if status == "refused" or "refused for other backends" in why and "tensorrt" in why
    ]
    assert set(REFUSED) == set(re.findall(r"`([\w.]+)`", " ".join(refused)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_documented_as_refused_is_refused(tmp_path: Path, name: str) -> None:
    text, reason = REFUSED[name]
    with pytest.raises(HostError) as caught:
        read(tmp_path, text)
    assert caught.value.message.startswith(reason)


WITHOUT_EFFECT = """
cc_model_filenames { key: "9.0" value: "x.py" }
model_operations { op_library_filename: "x.so" }
input { name: "a" data_type: TYPE_BOOL dims: [1, 1, 1] format: FORMAT_NCHW }
instance_group {
  host_policy: "p"
  secondary_devices { kind: KIND_NVDLA device_id: 1 }
}
optimization {
  graph { level: 1 }
  priority: PRIORITY_MAX
  cuda {
    graphs: true
    busy_wait_events: true
    output_copy_stream: true
    graph_spec {
      batch_size: 1
      input { key: "a" value { dim: 1 } }
      graph_lower_bound { batch_size: 1 input { key: "a" value { dim: 1 } } }
    }
  }
  execution_accelerators {
    gpu_execution_accelerator { name: "x" parameters { key: "a" value: "b" } }
    cpu_execution_accelerator { name: "y" }
  }
  input_pinned_memory { enable: false }
  output_pinned_memory { enable: false }
  gather_kernel_buffer_threshold: 1
  eager_batching: true
}
"""


def test_fields_without_effect_are_accepted_and_printed(tmp_path: Path) -> None:
    asked = parse_pbtxt(WITHOUT_EFFECT, "config.pbtxt")
    shown = read(tmp_path, WITHOUT_EFFECT)
    for name in ("cc_model_filenames", "model_operations", "input", "optimization"):
        assert getattr(shown, name) == getattr(asked, name)
    group = shown.instance_group[0]
    assert group.host_policy == "p"
    assert list(group.secondary_devices) == list(asked.instance_group[0].secondary_devices)


def given(message: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields that are set."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        yield name
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            if inner.fields_by_name["value"].message_type is not None:
                for entry in value.values():
                    yield from given(entry, f"{name}.")
        elif inner is not None:
            several = not hasattr(value, "ListFields")
            for part in value if several else [value]:
                yield from given(part, f"{name}.")


def test_the_sample_has_every_field_without_effect() -> None:
    asked = {documented(name) for name in given(parse_pbtxt(WITHOUT_EFFECT, "config.pbtxt"))}
    idle = {name for name, status in STATUSES.items() if status == "without effect"}
    # Their only values are defaults, so they are never among the fields that are set.
    unseen = {name for name in idle if name.endswith(".enable")}
    unseen.add("instance_group.secondary_devices.kind")
    unseen.add("ensemble_scheduling.step.model_namespace")  # the sample is not an ensemble
    assert idle - unseen <= asked


TESTS_OF_FIELDS = {
    "test_loading.py": {
        "test_a_model_without_config_completes_itself": "name input output max_batch_size",
        "test_versions_follow_the_policy": (
            "version_policy version_policy.latest version_policy.all version_policy.specific"
        ),
        "test_another_file_name_and_neighbours_of_every_kind": "default_model_filename",
        "test_instances_are_as_many_and_named_as_the_groups_say": (
            "instance_group instance_group.name instance_group.count"
        ),
    },
    "test_backends.py": {
        "test_a_python_based_backend_serves_models_that_hold_only_data": "backend parameters",
        "test_a_backend_that_cannot_be_found_or_run_fails_the_load_with_its_reason": "runtime",
    },
    "test_ensembles.py": {
        "test_a_tensor_goes_from_step_to_step": (
            "platform ensemble_scheduling ensemble_scheduling.step"
        ),
    },
    "test_ensemble_loading.py": {
        "test_an_ensemble_that_does_not_fit_is_refused": "ensemble_scheduling.step.model_version",
    },
    "test_ensemble_limits.py": {
        "test_a_stream_is_held_up_when_a_step_has_to_wait": (
            "ensemble_scheduling.max_inflight_requests"
        ),
    },
    "test_namespacing.py": {
        "test_an_ensemble_is_made_of_what_lies_beside_it_or_else_of_the_only_one": (
            "ensemble_scheduling.step.model_namespace"
        ),
    },
    "test_tensorrt.py": {
        "test_the_file_for_a_gpus_capability_comes_before_the_default": "cc_model_filenames",
        "test_an_instance_has_the_profiles_of_its_group": "instance_group.profile",
        "test_graphs_are_for_one_item_and_the_preferred_sizes_unless_specified": (
            "optimization.cuda optimization.cuda.graphs"
        ),
        "test_a_graph_spec_names_shapes_and_the_values_of_shape_tensors": (
            "optimization.cuda.graph_spec"
        ),
    },
    "test_accelerators.py": {
        "test_a_secondary_device_is_the_dla_core_of_tensorrt": "instance_group.secondary_devices",
        "test_gpu_accelerators_come_before_cuda_and_the_cpu": (
            "optimization.execution_accelerators"
        ),
    },
    "test_backend_onnx.py": {
        "test_a_model_that_cannot_be_served_says_why_and_the_others_serve": (
            "model_operations optimization optimization.graph"
            " optimization.execution_accelerators.cpu_execution_accelerator"
        ),
    },
    "test_metrics.py": {"test_metric_tags_become_labels_of_the_models_series": "metric_tags"},
    "test_latency.py": {
        "test_a_model_may_set_the_buckets_of_the_first_response_histogram": "model_metrics",
    },
    "test_streams.py": {
        "test_a_model_sends_any_number_of_responses": "model_transaction_policy",
    },
    "test_agents.py": {"test_a_file_that_has_changed_is_not_loaded": "model_repository_agents"},
    "test_cache.py": {"test_an_equal_request_is_answered_from_the_cache": "response_cache"},
    "test_validation.py": {
        "test_optional_input_may_be_left_out_or_given": "input.optional",
        "test_input_reaches_the_model_reshaped_and_the_clients_tensor_is_untouched": (
            "input.reshape"
        ),
        "test_output_is_restored_for_the_client": "output.reshape",
        "test_a_shape_tensor_has_the_size_of_the_batch_as_its_first_value_and_no_batch": (
            "input.is_shape_tensor output.is_shape_tensor"
        ),
        "test_tensors_in_other_formats_may_have_any_number_of_bytes": (
            "input.is_non_linear_format_io output.is_non_linear_format_io"
        ),
    },
    "test_ragged.py": {
        "test_ragged_requests_share_a_batch_and_get_batch_inputs": (
            "input.allow_ragged_batch batch_input"
        ),
        "test_output_of_the_whole_batch_is_split_by_request": "batch_output",
    },
    "test_http_protocol.py": {
        "test_classes_have_values_indices_and_labels": "output.label_filename",
    },
    "test_scheduling.py": {
        "test_batches_have_the_largest_preferred_size_that_can_be_reached": "dynamic_batching",
        "test_responses_leave_in_the_order_of_the_requests_if_the_model_says_so": (
            "dynamic_batching.preserve_ordering"
        ),
        "test_higher_priorities_go_first_and_unknown_ones_are_the_default": (
            "dynamic_batching.priority_levels dynamic_batching.default_priority_level"
            " dynamic_batching.priority_queue_policy"
        ),
        "test_one_request_too_many_is_refused_at_once_and_not_counted": (
            "dynamic_batching.default_queue_policy"
            " dynamic_batching.default_queue_policy.max_queue_size"
        ),
        "test_delayed_requests_run_after_requests_that_are_in_time": (
            "dynamic_batching.default_queue_policy.timeout_action"
        ),
        "test_a_request_may_shorten_its_time_where_the_policy_allows_it": (
            "dynamic_batching.default_queue_policy.allow_timeout_override"
        ),
        "test_a_request_is_refused_when_it_has_waited_too_long_while_the_instance_is_busy": (
            "dynamic_batching.default_queue_policy.default_timeout_microseconds"
        ),
    },
    "test_sequences.py": {
        "test_rows_of_direct_batches_are_slots": "sequence_batching sequence_batching.direct",
        "test_idle_sequences_are_forgotten": "sequence_batching.max_sequence_idle_microseconds",
        "test_models_see_where_in_its_sequence_a_request_is": "sequence_batching.control_input",
        "test_states_go_from_request_to_request": "sequence_batching.state",
        "test_states_can_start_from_a_file_and_be_seen": "sequence_batching.state.initial_state",
        "test_memory_that_grows_is_for_gpus": "sequence_batching.state.use_growable_memory",
        "test_requests_can_be_run_again": "sequence_batching.iterative_sequence",
    },
    "test_sequence_scheduler.py": {
        "test_direct_batches_can_wait_for_a_share_of_the_slots": (
            "sequence_batching.direct.minimum_slot_utilization"
        ),
        "test_oldest_batches_wait_for_a_preferred_size_until_their_delay_is_over": (
            "sequence_batching.oldest"
        ),
        "test_oldest_strategy_preserves_order_if_configured": (
            "sequence_batching.oldest.preserve_ordering"
        ),
    },
    "test_sequence_call.py": {
        "test_zero_data_gives_zeros_whatever_its_value": (
            "sequence_batching.state.initial_state.zero_data"
        ),
    },
    "test_instance_groups.py": {
        "test_gpus_of_a_group_share_the_names_of_its_instances": (
            "instance_group.kind instance_group.gpus"
        ),
    },
    "test_warmup.py": {
        "test_a_passive_instance_is_there_and_takes_nothing": "instance_group.passive",
        "test_samples_run_in_their_order_in_batches_and_as_often_as_they_say": "model_warmup",
        "test_random_data_is_random": "model_warmup.inputs.random_data",
        "test_a_file_holds_one_item_of_the_batch": "model_warmup.inputs.input_data_file",
    },
    "test_rate_limiter.py": {
        "test_an_execution_waits_for_the_resource_that_another_models_has": (
            "instance_group.rate_limiter"
        ),
        "test_an_instance_of_priority_two_is_run_half_as_often": (
            "instance_group.rate_limiter.priority"
        ),
    },
    "test_host_policies.py": {
        "test_a_group_may_name_its_policy": "instance_group.host_policy",
    },
}
"""Tests that fail if a field has no effect, with the fields. A field covers the fields in it."""


def fields_with_tests() -> set[str]:
    return {
        name
        for tests in TESTS_OF_FIELDS.values()
        for names in tests.values()
        for name in names.split()
    }


@pytest.mark.parametrize("file", sorted(TESTS_OF_FIELDS))
def test_listed_tests_of_honoured_fields_exist(file: str) -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob(file))
    for test in TESTS_OF_FIELDS[file]:
        assert re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), test


def test_every_honoured_field_has_a_test() -> None:
    known = fields_with_tests()
    assert known <= {name for name, status in STATUSES.items() if status == "honoured"}
    for name, status in STATUSES.items():
        if status == "honoured":
            parts = name.split(".")
            above = {".".join(parts[: end + 1]) for end in range(len(parts))}
            assert above & known, name

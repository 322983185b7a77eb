"""What a model's `auto_complete_config` returned, merged into its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from host.config.auto_complete import complete_config, merge_completed
from host.config.json_form import to_json
from host.config.model_config import ConfigSettings, LoadedConfig, load_config
from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError

TENSORS = """
input { name: "i" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "o" data_type: TYPE_FP32 dims: [ 1 ] }
"""


def config(text: str) -> ModelConfig:
    return parse_pbtxt(text, "config.pbtxt")


def merge(before: ModelConfig, answer: dict[str, Any]) -> ModelConfig:
    return merge_completed(before, json.dumps(answer))


def test_completion_replaces_only_batch_size_and_tensors() -> None:
    before = config('name: "m" max_batch_size: 1 input { name: "a" } output { name: "b" }')
    completed = config(
        'name: "other" max_batch_size: 4 input { name: "c" } parameters { key: "k" }'
    )
    after = merge_completed(before, to_json(completed))
    assert (after.name, after.max_batch_size) == ("m", 4)
    assert [tensor.name for tensor in after.input] == ["c"]
    assert not after.output
    assert not after.parameters
    assert before.max_batch_size == 1, "the configuration that was merged into stays as it was"


def test_a_completed_scheduler_is_merged_and_normalised() -> None:
    after = merge(config(""), {"max_batch_size": 8, "dynamic_batching": {}})
    assert list(after.dynamic_batching.preferred_batch_size) == [8]


def test_an_existing_scheduler_keeps_its_settings() -> None:
    before = config("dynamic_batching { max_queue_delay_microseconds: 5 }")
    same = merge_completed(before, to_json(before))
    assert same.dynamic_batching.max_queue_delay_microseconds == 5
    other = merge(before, {"dynamic_batching": {}})
    assert other.dynamic_batching.max_queue_delay_microseconds == 5
    assert merge(before, {}).HasField("dynamic_batching")


@pytest.mark.parametrize(
    ("scheduler", "number"),
    [("dynamic_batching", 11), ("sequence_batching", 13), ("ensemble_scheduling", 15)],
)
def test_a_different_scheduler_is_refused(scheduler: str, number: int) -> None:
    other = "sequence_batching" if number == 11 else "dynamic_batching"
    with pytest.raises(HostError) as caught:
        merge(config(f"{scheduler} {{}}"), {other: {}})
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"Cannot update scheduling choice from {number} to {number} when auto-completing."
    )


def test_a_completed_transaction_policy_is_merged() -> None:
    decoupled = config("model_transaction_policy { decoupled: true }")
    after = merge_completed(config(""), to_json(decoupled))
    assert after.model_transaction_policy.decoupled
    assert merge(decoupled, {}).model_transaction_policy.decoupled
    coupled = {"model_transaction_policy": {"decoupled": False}}
    assert not merge(decoupled, coupled).model_transaction_policy.decoupled


def test_an_error_in_the_completed_configuration_names_the_field() -> None:
    with pytest.raises(HostError, match="unknown field 'inputs' in ModelConfig, did you mean"):
        merge(config(""), {"inputs": []})


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    """The configuration of a Python model `m` with two tensors."""
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()
    (directory / "config.pbtxt").write_text(f"{TENSORS} max_batch_size: 2")
    return load_config(directory, ConfigSettings())


def test_a_model_cannot_complete_itself_with_an_unsupported_setting(loaded: LoadedConfig) -> None:
    loaded.config.batch_output.add(target_name=["o"], source_input=["i"])
    completed = {
        "input": [{"name": "i", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [-1]}],
        "model_transaction_policy": {"decoupled": True},
    }
    with pytest.raises(HostError, match="the responses of a decoupled model do not form a batch"):
        complete_config(loaded, json.dumps(completed))


def test_an_error_about_a_completed_tensor_has_no_position_in_the_file(
    loaded: LoadedConfig,
) -> None:
    assert loaded.source is not None
    completed = '{"input": [{"name": "i", "data_type": "TYPE_FP32"}]}'
    with pytest.raises(HostError) as caught:
        complete_config(loaded, completed)
    assert caught.value.message == (
        f"model input 'i' must specify 'dims' for m ({loaded.source.path}, field 'input[0].dims')"
    )


def test_completing_does_not_change_the_loaded_configuration(loaded: LoadedConfig) -> None:
    completed = '{"max_batch_size": 4}'
    assert complete_config(loaded, completed).max_batch_size == 4
    assert complete_config(loaded).max_batch_size == 2

"""Merging the result of `auto_complete_config`: which fields change and which do not."""

from __future__ import annotations

import pytest

from host.config.auto_complete import merge_completed
from host.config.json_form import to_dict, to_json
from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError


def config(text: str) -> ModelConfig:
    return parse_pbtxt(text, "config.pbtxt")


def test_completion_replaces_only_batch_size_and_tensors() -> None:
    before = config('name: "m" max_batch_size: 1 input { name: "a" } output { name: "b" }')
    completed = config(
        'name: "other" max_batch_size: 4 input { name: "c" } parameters { key: "k" }'
    )
    after = merge_completed(before, completed)
    assert (after.name, after.max_batch_size) == ("m", 4)
    assert [tensor.name for tensor in after.input] == ["c"]
    assert not after.output
    assert not after.parameters
    assert before.max_batch_size == 1, "the configuration that was merged into stays as it was"


@pytest.mark.parametrize("form", [to_dict, to_json, lambda message: message])
def test_a_completed_configuration_may_be_json_a_dict_or_a_message(form: object) -> None:
    completed = config("max_batch_size: 4")
    assert callable(form)
    assert merge_completed(config(""), form(completed)).max_batch_size == 4


def test_a_completed_scheduler_is_merged_and_normalised() -> None:
    after = merge_completed(config(""), {"max_batch_size": 8, "dynamic_batching": {}})
    assert list(after.dynamic_batching.preferred_batch_size) == [8]


def test_an_existing_scheduler_keeps_its_settings() -> None:
    before = config("dynamic_batching { max_queue_delay_microseconds: 5 }")
    assert merge_completed(before, before).dynamic_batching.max_queue_delay_microseconds == 5
    assert (
        merge_completed(
            before, {"dynamic_batching": {}}
        ).dynamic_batching.max_queue_delay_microseconds
        == 5
    )
    assert merge_completed(before, {}).HasField("dynamic_batching")


@pytest.mark.parametrize(
    ("scheduler", "number"),
    [("dynamic_batching", 11), ("sequence_batching", 13), ("ensemble_scheduling", 15)],
)
def test_a_different_scheduler_is_refused(scheduler: str, number: int) -> None:
    other = "sequence_batching" if number == 11 else "dynamic_batching"
    with pytest.raises(HostError) as caught:
        merge_completed(config(f"{scheduler} {{}}"), {other: {}})
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"Cannot update scheduling choice from {number} to {number} when auto-completing."
    )


def test_a_completed_transaction_policy_is_merged() -> None:
    decoupled = config("model_transaction_policy { decoupled: true }")
    assert merge_completed(config(""), decoupled).model_transaction_policy.decoupled
    assert merge_completed(decoupled, {}).model_transaction_policy.decoupled
    assert not merge_completed(
        decoupled, {"model_transaction_policy": {"decoupled": False}}
    ).model_transaction_policy.decoupled


def test_an_error_in_the_completed_configuration_names_the_field() -> None:
    with pytest.raises(HostError, match="unknown field 'inputs' in ModelConfig, did you mean"):
        merge_completed(config(""), {"inputs": []})

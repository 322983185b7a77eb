"""Merges the result of a model's `auto_complete_config` into its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.config.defaults import normalise_config
from host.config.json_form import from_json
from host.config.schema import ModelConfig, new_config, pb
from host.errors import internal

_REPLACED_LISTS = ("input", "output")


def merge_completed(
    config: ModelConfig, completed: str | Mapping[str, Any] | ModelConfig
) -> ModelConfig:
    """Returns a copy of `config` with the completed fields; `completed` may be JSON.

    Takes the inputs, the outputs, the maximum batch size and the transaction policy of `completed`,
    and its scheduler if `config` has none (docs/reference/configuration-and-scheduling.md, "From
    the directory to a served model"). All other fields of `completed` are ignored. Raises HostError
    for invalid JSON or another scheduler.
    """
    if not isinstance(completed, pb.ModelConfig):
        completed = from_json(completed)
    merged = new_config()
    merged.CopyFrom(config)
    merged.max_batch_size = completed.max_batch_size
    for name in _REPLACED_LISTS:
        merged.ClearField(name)
        getattr(merged, name).extend(getattr(completed, name))
    _merge_scheduler(merged, completed)
    if completed.HasField("model_transaction_policy"):
        merged.model_transaction_policy.decoupled = completed.model_transaction_policy.decoupled
    normalise_config(merged)
    return merged


def _merge_scheduler(merged: ModelConfig, completed: ModelConfig) -> None:
    present = merged.WhichOneof("scheduling_choice")
    offered = completed.WhichOneof("scheduling_choice")
    if present is None and offered is not None:
        getattr(merged, offered).CopyFrom(getattr(completed, offered))
    elif offered not in (None, present):
        number = merged.DESCRIPTOR.fields_by_name[present].number
        # Triton's text has the number of the old choice twice.
        raise internal(
            f"Cannot update scheduling choice from {number} to {number} when auto-completing."
        )

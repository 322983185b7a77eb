"""What a configuration takes over from the one that a model completed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.config.json_form import from_json
from host.config.normalise import normalise_config
from host.config.schema import ModelConfig, new_config, pb
from host.errors import internal

_REPLACED_LISTS = ("input", "output")


def merge_completed(
    config: ModelConfig, completed: str | Mapping[str, Any] | ModelConfig
) -> ModelConfig:
    """`config` with what auto-completion may change; `completed` is a whole one, perhaps in JSON.

    Tensors and batch size are replaced, a scheduler is taken over where there is none, and so is
    the transaction policy (configuration spec 2.4). Everything else in `completed` is ignored.
    """
    if not isinstance(completed, pb.ModelConfig):
        completed = from_json(completed)
    merged = new_config()
    merged.CopyFrom(config)
    merged.max_batch_size = completed.max_batch_size
    for name in _REPLACED_LISTS:
        merged.ClearField(name)
        getattr(merged, name).extend(getattr(completed, name))
    _take_scheduler(merged, completed)
    if completed.HasField("model_transaction_policy"):
        merged.model_transaction_policy.decoupled = completed.model_transaction_policy.decoupled
    normalise_config(merged)
    return merged


def _take_scheduler(merged: ModelConfig, completed: ModelConfig) -> None:
    present = merged.WhichOneof("scheduling_choice")
    offered = completed.WhichOneof("scheduling_choice")
    if present is None and offered is not None:
        getattr(merged, offered).CopyFrom(getattr(completed, offered))
    elif offered not in (None, present):
        number = merged.DESCRIPTOR.fields_by_name[present].number
        # Both numbers name the old choice: the text is known in this form.
        raise internal(
            f"Cannot update scheduling choice from {number} to {number} when auto-completing."
        )

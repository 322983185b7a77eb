"""Merges what a model's `auto_complete_config` returns into its configuration.

The rules are in docs/reference/configuration-and-scheduling.md, "From the directory to a served
model".
"""

from __future__ import annotations

from itertools import chain

from host.config.defaults import normalise_config
from host.config.findings import raise_first
from host.config.json_form import from_json
from host.config.model_config import LoadedConfig
from host.config.schema import ModelConfig, new_config
from host.config.validate import check_config, check_supported, check_tensors
from host.errors import internal

_REPLACED_LISTS = ("input", "output")


def complete_config(loaded: LoadedConfig, completed: str | None = None) -> ModelConfig:
    """Merges the result of `auto_complete_config`, if any, and checks the configuration again.

    `completed`: JSON. Raises HostError.
    """
    loaded.check_instances()
    config = new_config()
    config.CopyFrom(loaded.config)
    source = loaded.source
    if completed is not None:
        config = merge_completed(loaded.config, completed)
        if source is not None:
            source = source.without_fields(_changed_fields(loaded.config, config))
    raise_first(chain(check_config(config), check_tensors(config), check_supported(config)), source)
    return config


def merge_completed(config: ModelConfig, completed: str) -> ModelConfig:
    """A copy of `config` with the completed fields of a configuration in JSON.

    Takes its inputs, outputs, maximum batch size and transaction policy, and its scheduler if
    `config` has none; its other fields are ignored. Raises HostError for invalid JSON or another
    scheduler.
    """
    answer = from_json(completed)
    merged = new_config()
    merged.CopyFrom(config)
    merged.max_batch_size = answer.max_batch_size
    for name in _REPLACED_LISTS:
        merged.ClearField(name)
        getattr(merged, name).extend(getattr(answer, name))
    _merge_scheduler(merged, answer)
    if answer.HasField("model_transaction_policy"):
        merged.model_transaction_policy.decoupled = answer.model_transaction_policy.decoupled
    normalise_config(merged)
    return merged


def _merge_scheduler(merged: ModelConfig, answer: ModelConfig) -> None:
    present = merged.WhichOneof("scheduling_choice")
    offered = answer.WhichOneof("scheduling_choice")
    if present is None and offered is not None:
        getattr(merged, offered).CopyFrom(getattr(answer, offered))
    elif offered not in (None, present):
        number = merged.DESCRIPTOR.fields_by_name[present].number
        # Triton's text has the number of the old choice twice.
        raise internal(
            f"Cannot update scheduling choice from {number} to {number} when auto-completing."
        )


def _changed_fields(before: ModelConfig, after: ModelConfig) -> list[str]:
    """The top-level fields whose values differ."""
    names = [field.name for field in before.DESCRIPTOR.fields]
    return [name for name in names if getattr(before, name) != getattr(after, name)]

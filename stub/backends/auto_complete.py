"""Completes a configuration with the tensors that a model's file describes.

See docs/reference/configuration-and-scheduling.md, "From the directory to a served model".
"""

from typing import Any, Dict, List, Sequence

import pb_utils
from stub.backends.contract import ModelTensor
from stub.user_model import ModelFailure


def is_complete(config: Dict[str, Any]) -> bool:
    """Returns whether the configuration has inputs and outputs, so that the file is not needed."""
    inputs = config.get("input") or config.get("batch_input")
    return bool(inputs and config.get("output"))


def complete_config(
    config: Dict[str, Any],
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
    default_max_batch_size: int,
) -> None:
    """Adds tensors, batch size and scheduler to `config`, in place. Raises ModelFailure."""
    model = config["name"]
    required = [tensor for tensor in inputs if not tensor.optional]
    batchable = all(
        tensor.shape and tensor.shape[0] == -1 for tensor in (*required, *outputs)
    ) and len(required) == len(inputs)
    size = config.get("max_batch_size", 0)
    if not batchable and size:
        raise ModelFailure(
            f"autofill failed for model '{model}': model does not support batching while non-zero"
            " max_batch_size is specified"
        )
    if batchable and not size:
        size = config["max_batch_size"] = default_max_batch_size
        if size > 1:
            pb_utils.Logger.log_info(
                f"model '{model}' supports batches and does not say how large they may be:"
                f" max_batch_size becomes {size}"
            )
    scheduled = "dynamic_batching" in config or "sequence_batching" in config
    if size > 1 and not scheduled:
        config["dynamic_batching"] = {}
    if not (config.get("input") or config.get("batch_input")):
        config["input"] = [_config_entry(tensor, size > 0, True) for tensor in inputs]
    if not config.get("output"):
        config["output"] = [_config_entry(tensor, size > 0, False) for tensor in outputs]


def _config_entry(tensor: ModelTensor, batches: bool, is_input: bool) -> Dict[str, Any]:
    dims: List[int] = list(tensor.shape or ())[1 if batches else 0 :]
    entry: Dict[str, Any] = {
        "name": tensor.name,
        "data_type": tensor.data_type,
        "dims": dims or [1],
    }
    if batches and not dims:
        entry["reshape"] = {"shape": []}
    if is_input and tensor.optional:
        entry["optional"] = True
    return entry

"""Compares the outputs of a response with those that the configuration declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence

from pb_utils._datatypes import NAMES

if TYPE_CHECKING:
    from pb_utils._response import InferenceResponse
    from pb_utils._tensor import Tensor


def find_mismatches(
    response: InferenceResponse, config: Mapping[str, Any], requested: Sequence[str] = ()
) -> List[str]:
    """Returns a sentence for each output that differs. A server passes such a response on.

    Args:
        response: a response that is not an error.
        config: the configuration of the model; a decoupled model may leave outputs out.
        requested: names of the requested outputs; all outputs if empty.
    """
    declared: Dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in config["output"]}
    tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
    found: List[str] = []
    for name, entry in declared.items():
        shape = declared_shape(entry, config["max_batch_size"])
        expected = f"the configuration declares {entry['data_type']} {shape}"
        tensor = tensors.get(name)
        if tensor is None:
            if not _is_decoupled(config) and (not requested or name in requested):
                found.append(f"output '{name}' is missing; {expected}")
            continue
        given = "TYPE_" + NAMES[tensor.triton_dtype()].replace("BYTES", "STRING")
        sizes = tensor.shape()
        fits = len(sizes) == len(shape) and all(
            wanted in (-1, size) for wanted, size in zip(shape, sizes)
        )
        if given != entry["data_type"] or not fits:
            found.append(f"output '{name}' is {given} {list(sizes)}; {expected}")
    return found


def describe_undeclared(
    model: str, outputs: Iterable[Tensor], declared: Sequence[str]
) -> Optional[str]:
    """Returns a sentence about the outputs that are not declared; None if there are none.

    Args:
        model: name of the model.
        outputs: the outputs of a response.
        declared: names of the outputs of its configuration.
    """
    names = [tensor._name for tensor in outputs if tensor._name not in declared]
    if not names:
        return None
    return (
        f"model '{model}' returned an output {_quote(names)}, which its configuration does not"
        f" have; the configuration has: {_quote(declared)}"
    )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no output"


def declared_shape(entry: Mapping[str, Any], max_batch_size: int) -> List[int]:
    """Returns the shape of a tensor for the model, with the batch dimension; -1 is any size."""
    dims = entry.get("reshape", {}).get("shape", entry["dims"])
    return [-1, *dims] if max_batch_size > 0 else list(dims)


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))

"""Converts between numpy arrays and PyTorch tensors."""

from typing import Any, List, Mapping

import numpy as np
import torch

import pb_utils
from pb_utils._storage import address_of, array_at
from stub.backends.batch import Array, InvalidInput
from stub.backends.contract import ConfiguredTensor, format_shape


def to_tensor(array: Array, data_type: str, modifies_inputs: bool, device: str) -> Any:
    """Returns a tensor over the array's memory, or over a copy if it must be writable or moved."""
    if not array.flags.writeable:
        # PyTorch has no read-only tensors. A program that does not write can use shared memory.
        address = address_of(array)
        shared = array_at(address, array.dtype, array.shape, array, writable=True)
        array = array.copy() if modifies_inputs else shared
    if data_type == "TYPE_BF16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(device) if device else tensor


def to_texts(name: str, array: Array) -> List[str]:
    """Returns all elements of a BYTES tensor as a list of texts. Raises InvalidInput."""
    try:
        return [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input '{name}' must be text in UTF-8: {error}") from error


def to_array(value: Any, expected: ConfiguredTensor, model: str) -> Array:
    """Returns one result as an array. Raises TritonModelException if it has another type."""
    if isinstance(value, torch.Tensor) and expected.data_type != "TYPE_STRING":
        tensor = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            # numpy has no BF16, so the array holds the bits in 16-bit integers.
            bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
            if expected.data_type == "TYPE_BF16":
                return bits
            raise _wrong_result_error(model, expected, "TYPE_BF16")
        return tensor.numpy()
    texts = [value] if isinstance(value, str) else value
    if expected.data_type == "TYPE_STRING" and _are_texts(texts):
        array = np.array(texts, dtype=np.object_)
        rest = [1 if size == -1 else size for size in expected.shape[1:]]
        if len(rest) and len(texts) % int(np.prod(rest)) == 0:
            return array.reshape([-1, *rest])
        return array
    raise _wrong_result_error(model, expected, type(value).__name__)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def results_by_name(value: Any, names: Mapping[str, int], model: str) -> Mapping[str, Any]:
    """Returns the results of `forward` by the outputs' names. Raises TritonModelException."""
    if isinstance(value, dict):
        missing = [name for name in names if name not in value]
        if missing:
            raise pb_utils.TritonModelException(
                f"model '{model}' returned a dict without the output '{missing[0]}', its keys are:"
                f" {', '.join(map(str, value))}"
            )
        return value
    single = not isinstance(value, (list, tuple)) or (value and _are_texts(value))
    results = [value] if single else value
    for name, index in names.items():
        if index >= len(results):
            raise pb_utils.TritonModelException(
                f"model '{model}' returned {len(results)} results, and the output '{name}' is"
                f" number {index} of them, counted from 0"
            )
    return {name: results[index] for name, index in names.items()}


def _wrong_result_error(
    model: str, expected: ConfiguredTensor, got: str
) -> pb_utils.TritonModelException:
    return pb_utils.TritonModelException(
        f"configuration expects datatype {expected.data_type} for output '{expected.name}' of"
        f" model '{model}' with shape {format_shape(expected.shape)}, model provides {got}"
    )

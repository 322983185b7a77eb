"""The text form of responses, for people at a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pb_utils._datatypes import BF16, NAMES

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._response import InferenceResponse
    from pb_utils._tensor import Tensor

_MAX_ELEMENTS = 64  # larger tensors are abbreviated


def format_response(number: int, response: InferenceResponse) -> str:
    """Returns lines with the parameters and the outputs of a response, without a last newline.

    Args:
        number: the position of the response in its stream, from 1.
        response: a response that is not an error.
    """
    parameters = response.parameters()
    suffix = f", parameters {parameters}" if parameters not in ("", "{}") else ""
    lines = [f"response {number}{suffix}"]
    for tensor in response.output_tensors():
        lines.append(f"  {tensor.name()} {NAMES[tensor.triton_dtype()]} {tensor.shape()}")
        lines += [f"    {line}" for line in format_tensor(tensor).split("\n")]
    return "\n".join(lines)


def format_tensor(tensor: Tensor, longest: int | None = None) -> str:
    """Returns the elements of a tensor, abbreviated if there are many.

    Args:
        tensor: a tensor in the memory of the host.
        longest: characters after which an element of BYTES is cut; None for all of them.
    """
    array = _readable_array(tensor, longest)
    return np.array2string(array, threshold=_MAX_ELEMENTS, separator=", ")


def _readable_array(tensor: Tensor, longest: int | None) -> npt.NDArray[Any]:
    """Returns an array to print: BYTES as text, BF16 as 32-bit numbers."""
    if tensor.triton_dtype() == BF16:
        halves = np.frombuffer(tensor._wire_data(), np.uint16).astype(np.uint32)
        wide: npt.NDArray[Any] = (halves << np.uint32(16)).view(np.float32)
        return wide.reshape(tensor.shape())
    array = tensor.as_numpy()
    if array.dtype != np.object_:
        return array
    texts = np.empty(array.size, dtype=np.object_)
    for index, element in enumerate(array.flat):
        try:
            text = element.decode()
        except UnicodeDecodeError:
            text = element
        texts[index] = text[:longest]
    return texts.reshape(array.shape)

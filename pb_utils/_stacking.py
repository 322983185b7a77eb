"""Stacks an input of all requests of a batch into one array, and splits results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List

import numpy as np

from pb_utils._model_exception import TritonModelException
from pb_utils._request import get_input_tensor_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pb_utils._request import InferenceRequest

    SplitResult = Callable[[npt.NDArray[Any]], List[npt.NDArray[Any]]]


def stack_inputs(
    requests: Sequence[InferenceRequest], name: str
) -> tuple[npt.NDArray[Any], SplitResult]:
    """Joins an input of all requests along the first dimension, the batch dimension.

    Triton does not have this function.

    Args:
        requests: the requests of ``execute``, at least one.
        name: name of the input. It must have the same shape in all requests, except for the first
            dimension.

    Returns:
        The joined array, which the model may change, and a function. The function takes an array
        with the same first dimension, such as the model's result, and returns a list with the part
        of each request, as views.

    Raises:
        TritonModelException: there are no requests, a request does not have the input, the shapes
            do not fit together, or a tensor cannot be converted to numpy.

    Examples:
        >>> x, split = pb_utils.stack_inputs(requests, "X")
        >>> return [
        ...     pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]) for y in split(self.run(x))
        ... ]
    """
    tensors = [get_input_tensor_by_name(request, name) for request in requests]
    if not tensors:
        raise TritonModelException("There are no requests to stack.")
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(tensors):
        index = tensors.index(None)
        raise TritonModelException(f"Request {index} of the batch has no input '{name}'.")
    first = found[0].shape()
    for index, tensor in enumerate(found):
        shape = tensor.shape()
        if not shape or shape[1:] != first[1:]:
            raise TritonModelException(
                f"Input '{name}' cannot be stacked: its shape is {first} in request 0 and {shape}"
                f" in request {index} of the batch."
            )
    ends = np.cumsum([tensor.shape()[0] for tensor in found]).tolist()
    if len(found) == 1:
        stacked = found[0].as_numpy()
    else:
        stacked = np.concatenate([tensor.as_numpy(copy=False) for tensor in found])

    def split(result: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        shape = list(np.shape(result))
        if shape[:1] != ends[-1:]:
            raise TritonModelException(
                f"The result cannot be split: its shape is {shape}, but the first dimension of the"
                f" stacked input '{name}' is {ends[-1]}."
            )
        return np.split(result, ends[:-1])

    return stacked, split

"""Creates the batch inputs of a batch, and splits its batch outputs.

They are `batch_input` and `batch_output` of a configuration
(docs/reference/scheduling.md, "batch_input and batch_output").
"""

import json
from math import prod
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

import pb_utils
from pb_utils._model_code import declared_shape

if TYPE_CHECKING:
    import numpy.typing as npt

_Shapes = Sequence[Sequence[int]]
_TYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


class BatchTensorError(Exception):
    """A batch input cannot be created, or a batch output cannot be split."""


def _counts(shapes: _Shapes, _lead: int) -> "npt.NDArray[Any]":
    return np.array([prod(shape) for shape in shapes], dtype=np.int64)


def _accumulated(shapes: _Shapes, lead: int) -> "npt.NDArray[Any]":
    return np.cumsum(_counts(shapes, lead))


def _accumulated_with_zero(shapes: _Shapes, lead: int) -> "npt.NDArray[Any]":
    return np.concatenate([[0], _accumulated(shapes, lead)])


def _max_count_as_shape(shapes: _Shapes, lead: int) -> "npt.NDArray[Any]":
    return np.zeros(int(_counts(shapes, lead).max()))


def _item_shapes(shapes: _Shapes, lead: int) -> "npt.NDArray[Any]":
    rows = [shape[lead:] for shape in shapes for _ in range(shape[0] if lead else 1)]
    if len({len(row) for row in rows}) > 1:
        raise BatchTensorError(f"shapes of different ranks cannot form a matrix: {rows}")
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)


def _flat_item_shapes(shapes: _Shapes, lead: int) -> "npt.NDArray[Any]":
    return _item_shapes(shapes, lead).reshape(-1)


_KINDS: "Dict[str, Callable[[_Shapes, int], npt.NDArray[Any]]]" = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _max_count_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _flat_item_shapes,
}


class BatchTensors:
    """The batch inputs and batch outputs of one model's configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._lead = 1 if config["max_batch_size"] > 0 else 0
        self._inputs = config.get("batch_input", [])
        self._outputs = config.get("batch_output", [])
        self._dims: Dict[str, List[int]] = {
            output["name"]: [int(size) for size in declared_shape(output, config["max_batch_size"])]
            for output in config["output"]
        }

    @classmethod
    def from_config(cls, model_config: str) -> "Optional[BatchTensors]":
        """Parses a configuration (JSON); returns None if it has no batch inputs or outputs."""
        config = json.loads(model_config)
        has_batch_tensors = config.get("batch_input") or config.get("batch_output")
        return cls(config) if has_batch_tensors else None

    def add_batch_inputs(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Adds the batch inputs to each request.

        Raises BatchTensorError.
        """
        for setting in self._inputs:
            shapes = _source_shapes(setting["source_input"][0], requests)
            values = _KINDS[setting["kind"]](shapes, self._lead).astype(
                _TYPES[setting["data_type"]]
            )
            for name in setting["target_name"]:
                for request in requests:
                    request._inputs.append(pb_utils.Tensor(name, values))

    def scatter_batch_outputs(
        self,
        requests: Sequence[pb_utils.InferenceRequest],
        returned: Sequence[Optional[pb_utils.InferenceResponse]],
    ) -> List[Optional[pb_utils.InferenceResponse]]:
        """Returns the responses, with outputs shaped like the inputs of their requests.

        An output that only the first response has, with the elements of all, is split.
        Raises BatchTensorError.
        """
        responses = list(returned)
        for setting in self._outputs:
            source = setting["source_input"][0]
            shapes = _source_shapes(source, requests)
            for name in setting["target_name"]:
                pieces = [_piece_shape(self._dims[name], shape, name, source) for shape in shapes]
                _scatter(name, pieces, responses)
        return responses


def _source_shapes(source: str, requests: Sequence[pb_utils.InferenceRequest]) -> List[List[int]]:
    shapes: List[List[int]] = []
    for request in requests:
        tensor = pb_utils.get_input_tensor_by_name(request, source)
        if tensor is None:
            raise BatchTensorError(
                f"batch inputs are computed from input '{source}', which a request lacks"
            )
        shapes.append(list(tensor.shape()))
    return shapes


def _piece_shape(dims: Sequence[int], shape: Sequence[int], name: str, source: str) -> List[int]:
    if any(size == -1 and index >= len(shape) for index, size in enumerate(dims)):
        raise BatchTensorError(
            f"output '{name}' of shape {list(dims)} takes its variable sizes from input '{source}',"
            f" whose shape {list(shape)} has no such dimension"
        )
    return [shape[index] if size == -1 else size for index, size in enumerate(dims)]


def _scatter(
    name: str,
    pieces: Sequence[Sequence[int]],
    responses: List[Optional[pb_utils.InferenceResponse]],
) -> None:
    found = [
        None
        if response is None or response.has_error()
        else pb_utils.get_output_tensor_by_name(response, name)
        for response in responses
    ]
    sizes = [prod(piece) for piece in pieces]
    first = found[0]
    if (
        first is not None
        and all(tensor is None for tensor in found[1:])
        and all(response is not None and not response.has_error() for response in responses)
    ):
        flat = first.as_numpy().reshape(-1)
        if flat.size == sum(sizes):
            ends = np.cumsum(sizes)
            for index, piece in enumerate(np.split(flat, ends[:-1])):
                _replace_output(responses, index, name, piece.reshape(pieces[index]))
            return
    for index, tensor in enumerate(found):
        if tensor is None:
            continue
        array = tensor.as_numpy()
        if array.size != sizes[index]:
            raise BatchTensorError(
                f"output '{name}' of request {index} has {array.size} elements, but its input gives"
                f" it the shape {list(pieces[index])}"
            )
        _replace_output(responses, index, name, array.reshape(pieces[index]))


def _replace_output(
    responses: List[Optional[pb_utils.InferenceResponse]],
    index: int,
    name: str,
    array: "npt.NDArray[Any]",
) -> None:
    """Replaces an output of a response by this array."""
    response = responses[index]
    assert response is not None
    others = [tensor for tensor in response.output_tensors() if tensor.name() != name]
    others.append(pb_utils.Tensor(name, array))
    replaced = pb_utils.InferenceResponse._from_wire(others, None, response._parameters)
    responses[index] = replaced

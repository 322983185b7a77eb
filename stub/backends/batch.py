"""Requests that run together: their inputs joined, and what the model makes of them split."""

from typing import Any, Callable, Dict, List, Mapping, Sequence

import numpy as np

import pb_utils
from pb_utils._datatypes import BF16, BYTES, STORAGE, TRITON_STRING_TO_NUMPY
from pb_utils._storage import byte_view, read_only_view
from stub.backends.contract import Contract, Expected
from stub.backends.placed import part_of

Array = Any
"""A numpy array; BF16 lies in 16-bit integers, BYTES are an object array of `bytes`."""

Run = Callable[[Dict[str, Array], List[str]], Mapping[str, Array]]
"""Runs the model: inputs by name, the outputs that are wanted; returns at least those."""

_CODES = {name: code for code, name in enumerate(TRITON_STRING_TO_NUMPY, 1)}
_CODES["TYPE_BF16"] = BF16


class BadInput(Exception):
    """A request cannot be run, by its sender's fault."""


def answer(
    requests: Sequence[pb_utils.InferenceRequest], contract: Contract, run: Run
) -> List[pb_utils.InferenceResponse]:
    """A response to each request: from one run, or from one run each if the model has no batches.

    What `run` raises goes through, except for BadInput, which is an INVALID_ARG error.
    """
    if contract.batches:
        return _together(requests, contract, run)
    return [response for each in requests for response in _together([each], contract, run)]


def _together(
    requests: Sequence[pb_utils.InferenceRequest], contract: Contract, run: Run
) -> List[pb_utils.InferenceResponse]:
    batch = Batch(requests, contract)
    try:
        return batch.responses(run(batch.inputs, batch.wanted))
    except BadInput as problem:
        if len(requests) > 1:  # the others have done nothing wrong
            return [one for each in requests for one in _together([each], contract, run)]
        error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INVALID_ARG)
        return [pb_utils.InferenceResponse(error=error)]


class Batch:
    """One run of a model.

    `inputs` of several requests are new arrays, joined along the first dimension. Those of a
    single one are read-only views of the memory in which they came. Ragged ones are flat.
    `wanted` are the outputs that any request asks for. `sizes` are items per request.
    """

    def __init__(self, requests: Sequence[pb_utils.InferenceRequest], contract: Contract) -> None:
        self._requests = requests
        self._contract = contract
        tensors = [{tensor.name(): tensor for tensor in each.inputs()} for each in requests]
        self.sizes = [_items(each) if contract.batches else 1 for each in tensors]
        # The scheduler joins only requests with the same set of inputs (configuration spec 4.7).
        self.inputs: Dict[str, Array] = {
            name: self._joined(name, [each[name] for each in tensors]) for name in tensors[0]
        }
        asked = set().union(*(each.requested_output_names() for each in requests))
        self.wanted = [name for name in contract.outputs if name in asked]

    def _joined(self, name: str, tensors: List[pb_utils.Tensor]) -> Array:
        expected = self._contract.inputs.get(name)
        if expected is not None and expected.of_batch:
            return array_of(tensors[0])  # every request has the same
        arrays = [array_of(tensor) for tensor in tensors]
        if expected is not None and expected.ragged:
            arrays = [array.reshape(-1) for array in arrays]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def responses(self, outputs: Mapping[str, Array]) -> List[pb_utils.InferenceResponse]:
        """One response per request, over parts of these arrays. Raises TritonModelException."""
        arrays = {name: self._checked(name, outputs) for name in self.wanted}
        answers: List[pb_utils.InferenceResponse] = []
        end = 0
        for request, size in zip(self._requests, self.sizes):
            start, end = end, end + size
            asked = request.requested_output_names()
            mine = {
                name: array
                for name, array in arrays.items()
                # What is about the batch is taken apart later, and lies in the first response.
                if (not answers if self._contract.outputs[name].of_batch else name in asked)
            }
            answers.append(self._response(request, mine, start, end))
        return answers

    def _response(
        self, request: pb_utils.InferenceRequest, arrays: Mapping[str, Array], start: int, end: int
    ) -> pb_utils.InferenceResponse:
        tensors: List[pb_utils.Tensor] = []
        for name, array in arrays.items():
            if self._contract.batches and not self._contract.outputs[name].of_batch:
                length = len(array) if array.ndim else 0
                if length < end:
                    return _too_short(request, name, end, length)
                array = array[start:end]
            tensors.append(tensor_over(self._contract.outputs[name], array))
        return pb_utils.InferenceResponse(tensors)

    def _checked(self, name: str, outputs: Mapping[str, Array]) -> Array:
        """The output in the configuration's data type and, if it is a scalar, shape."""
        expected, array = self._contract.outputs[name], outputs[name]
        code = _CODES[expected.data_type]
        if array.dtype.kind == "U":
            array = array.astype(np.object_)
        if array.dtype != STORAGE[code] and not (code == BYTES and array.dtype.kind == "S"):
            raise pb_utils.TritonModelException(
                f"configuration expects datatype {expected.data_type} for output '{name}' of model"
                f" '{self._contract.model}', model provides {data_type_of(array)}"
            )
        return array.reshape(1) if not array.ndim and expected.shape == [1] else array


def _items(tensors: Mapping[str, pb_utils.Tensor]) -> int:
    for tensor in tensors.values():
        return tensor.shape()[0]
    return 1  # every input was optional, and left out


def array_of(tensor: pb_utils.Tensor) -> Array:
    """The content without a copy, except for BYTES, which must be taken apart."""
    if tensor.triton_dtype() == BF16:
        data = tensor._wire_data()
        return read_only_view(data, STORAGE[BF16], tensor.shape(), (tensor._owner, tensor))
    return tensor.as_numpy(copy=False)


def tensor_over(expected: Expected, array: Array) -> pb_utils.Tensor:
    """A tensor over the array's memory, by reference if that is shared memory of this process."""
    block = part_of(array)
    if block is not None:
        code = _CODES[expected.data_type]
        shape = list(array.shape)
        return pb_utils.Tensor._from_wire(expected.name, code, shape, block.data, block)
    if expected.data_type != "TYPE_BF16":
        return pb_utils.Tensor(expected.name, array)
    array = np.ascontiguousarray(array)
    return pb_utils.Tensor._from_wire(
        expected.name, BF16, list(array.shape), byte_view(array), array
    )


def _too_short(
    request: pb_utils.InferenceRequest, name: str, wanted: int, length: int
) -> pb_utils.InferenceResponse:
    text = (
        f"[request id: {request.request_id() or '<id_unknown>'}] failed to split the output tensor"
        f" '{name}' in responses: expected batch size of at least {wanted} in model output, got"
        f" {length}"
    )
    error = pb_utils.TritonError(text, pb_utils.TritonError.UNSUPPORTED)
    return pb_utils.InferenceResponse(error=error)


def data_type_of(array: Array) -> str:
    """The configuration's name of an array's data type; that of numpy where there is none."""
    for code, name in enumerate(TRITON_STRING_TO_NUMPY, 1):
        if STORAGE[code] == array.dtype:
            return name
    return str(array.dtype)

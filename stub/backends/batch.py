"""Requests that run together: their inputs joined, and what the model makes of them split."""

from typing import Any, Callable, Dict, List, Mapping, Sequence

import numpy as np

import pb_utils
from pb_utils._datatypes import BF16, BYTES, STORAGE, TRITON_STRING_TO_NUMPY
from pb_utils._storage import byte_view, read_only_view
from stub.backends.contract import ConfiguredTensor, ModelContract
from stub.backends.output_memory import block_of

Array = Any
"""A numpy array; BF16 lies in 16-bit integers, BYTES are an object array of `bytes`."""

RunFunction = Callable[[Dict[str, Array], List[str]], Mapping[str, Array]]
"""Runs the model: inputs by name, the outputs that are wanted; returns at least those."""

_TRITON_CODES = {name: code for code, name in enumerate(TRITON_STRING_TO_NUMPY, 1)}
_TRITON_CODES["TYPE_BF16"] = BF16


class InvalidInput(Exception):
    """A request cannot be run, by its sender's fault."""


def run_requests(
    requests: Sequence[pb_utils.InferenceRequest], contract: ModelContract, run: RunFunction
) -> List[pb_utils.InferenceResponse]:
    """A response to each request: from one run, or from one run each if the model has no batches.

    What `run` raises goes through, except for InvalidInput, which is an INVALID_ARG error.
    """
    if len(requests) == 1 and contract.has_only_plain_tensors:
        return [_run_single(requests[0], contract, run)]
    if contract.supports_batching:
        return _run_batch(requests, contract, run)
    return [response for each in requests for response in _run_batch([each], contract, run)]


def _run_single(
    request: pb_utils.InferenceRequest, contract: ModelContract, run: RunFunction
) -> pb_utils.InferenceResponse:
    """As `_run_batch`, in fewer steps, as most batches of quick networks have one request."""
    inputs = {tensor._name: array_from_tensor(tensor) for tensor in request._inputs}
    wanted = [name for name in contract.outputs if name in request._requested_output_names]
    items = len(next(iter(inputs.values()))) if inputs and contract.supports_batching else 1
    try:
        outputs = run(inputs, wanted)
    except InvalidInput as problem:
        return _invalid_arg_response(problem)
    tensors: List[pb_utils.Tensor] = []
    for name in wanted:
        array = _checked_output(contract, name, outputs)
        if contract.supports_batching:
            length = len(array) if array.ndim else 0
            if length < items:
                return _too_small_response(request, name, items, length)
            if length > items:
                array = array[:items]
        tensors.append(tensor_from_array(contract.outputs[name], array))
    return pb_utils.InferenceResponse._from_wire(tensors, None, {})


def _run_batch(
    requests: Sequence[pb_utils.InferenceRequest], contract: ModelContract, run: RunFunction
) -> List[pb_utils.InferenceResponse]:
    batch = Batch(requests, contract)
    try:
        return batch.responses(run(batch.inputs, batch.wanted))
    except InvalidInput as problem:
        if len(requests) > 1:  # the others have done nothing wrong
            return [one for each in requests for one in _run_batch([each], contract, run)]
        return [_invalid_arg_response(problem)]


def _invalid_arg_response(problem: InvalidInput) -> pb_utils.InferenceResponse:
    error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)


class RawTensor:
    """A tensor whose bytes are in a layout of the model's own: as many for each item as for others.

    `shape` is complete, and does not tell how many bytes there are.
    """

    __slots__ = ("data", "shape")

    def __init__(self, data: Array, shape: Sequence[int]) -> None:
        self.data = data
        self.shape = list(shape)

    @property
    def ndim(self) -> int:
        """Dimensions, with that of the batch."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, items: slice) -> "RawTensor":
        start, end, _ = items.indices(len(self))
        size = len(self.data) // max(1, len(self))
        return RawTensor(self.data[start * size : end * size], [end - start, *self.shape[1:]])


class Batch:
    """One run of a model.

    `inputs` of several requests are new arrays, joined along the first dimension. Those of a
    single one are read-only views of the memory in which they came. Ragged ones are flat.
    `wanted` are the outputs that any request asks for. `sizes` are items per request.
    """

    def __init__(
        self, requests: Sequence[pb_utils.InferenceRequest], contract: ModelContract
    ) -> None:
        self._requests = requests
        self._contract = contract
        tensors = [{tensor.name(): tensor for tensor in each.inputs()} for each in requests]
        self.sizes = [
            _batch_size(each, contract) if contract.supports_batching else 1 for each in tensors
        ]
        # The scheduler batches only requests with the same set of inputs
        # (docs/reference/configuration_and_scheduling.md, 4.7).
        self.inputs: Dict[str, Array] = {
            name: self._concatenated_input(name, [each[name] for each in tensors])
            for name in tensors[0]
        }
        asked = set().union(*(each.requested_output_names() for each in requests))
        self.wanted = [name for name in contract.outputs if name in asked]

    def _concatenated_input(self, name: str, tensors: List[pb_utils.Tensor]) -> Array:
        expected = self._contract.inputs.get(name)
        if expected is not None and expected.is_batch_tensor:
            return array_from_tensor(tensors[0])  # every request has the same
        if expected is not None and expected.is_non_linear:
            return _joined_raw(tensors)
        arrays = [array_from_tensor(tensor) for tensor in tensors]
        if expected is not None and expected.ragged:
            arrays = [array.reshape(-1) for array in arrays]
        if expected is not None and expected.is_shape_tensor and len(arrays) > 1:
            total = arrays[0].copy()  # the scheduler joins only equal ones, but for their first
            total[0] = sum(array[0] for array in arrays)
            return total
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def responses(self, outputs: Mapping[str, Array]) -> List[pb_utils.InferenceResponse]:
        """One response per request, over parts of these arrays. Raises TritonModelException."""
        arrays = {name: _checked_output(self._contract, name, outputs) for name in self.wanted}
        answers: List[pb_utils.InferenceResponse] = []
        end = 0
        for request, size in zip(self._requests, self.sizes):
            start, end = end, end + size
            asked = request.requested_output_names()
            mine = {
                name: array
                for name, array in arrays.items()
                # What is about the batch is taken apart later, and lies in the first response.
                if (not answers if self._contract.outputs[name].is_batch_tensor else name in asked)
            }
            answers.append(self._response(request, mine, start, end))
        return answers

    def _response(
        self, request: pb_utils.InferenceRequest, arrays: Mapping[str, Array], start: int, end: int
    ) -> pb_utils.InferenceResponse:
        tensors: List[pb_utils.Tensor] = []
        for name, array in arrays.items():
            expected = self._contract.outputs[name]
            if expected.is_shape_tensor and self._contract.supports_batching:
                array = array.copy()
                array[0] = end - start
            elif self._contract.supports_batching and not expected.is_batch_tensor:
                length = len(array) if array.ndim else 0
                if length < end:
                    return _too_small_response(request, name, end, length)
                array = array[start:end]
            tensors.append(tensor_from_array(expected, array))
        return pb_utils.InferenceResponse(tensors)


def _checked_output(contract: ModelContract, name: str, outputs: Mapping[str, Array]) -> Array:
    """The output in the configuration's data type and, if it is a scalar, shape."""
    expected, array = contract.outputs[name], outputs[name]
    if expected.is_non_linear:
        return array
    if array.dtype.kind == "U":
        array = array.astype(np.object_)
    code = _TRITON_CODES[expected.data_type]
    if array.dtype != STORAGE[code] and not (code == BYTES and array.dtype.kind == "S"):
        raise pb_utils.TritonModelException(
            f"configuration expects datatype {expected.data_type} for output '{name}' of model"
            f" '{contract.model}', model provides {data_type_of(array)}"
        )
    return array.reshape(1) if not array.ndim and expected.shape == [1] else array


def _batch_size(tensors: Mapping[str, pb_utils.Tensor], contract: ModelContract) -> int:
    for name, tensor in tensors.items():
        expected = contract.inputs.get(name)
        if expected is None or not expected.is_shape_tensor:
            return tensor.shape()[0]
    return 1  # every input was optional, and left out


def array_from_tensor(tensor: pb_utils.Tensor) -> Array:
    """The content without a copy, except for BYTES, which must be taken apart."""
    if tensor.triton_dtype() == BF16:
        data = tensor._wire_data()
        return read_only_view(data, STORAGE[BF16], tensor.shape(), (tensor._owner, tensor))
    return tensor.as_numpy(copy=False)


def _joined_raw(tensors: Sequence[pb_utils.Tensor]) -> RawTensor:
    parts: List[Array] = []
    for tensor in tensors:
        data = tensor._wire_data()
        owner = (tensor._owner, tensor)
        parts.append(read_only_view(data, np.dtype(np.uint8), [len(data)], owner))
    shape = tensors[0].shape()
    if len(tensors) == 1:
        return RawTensor(parts[0], shape)
    return RawTensor(np.concatenate(parts), [sum(each.shape()[0] for each in tensors), *shape[1:]])


def tensor_from_array(expected: ConfiguredTensor, array: Array) -> pb_utils.Tensor:
    """A tensor over the array's memory, by reference if that is shared memory of this process."""
    if isinstance(array, RawTensor):
        code, data = _TRITON_CODES[expected.data_type], np.ascontiguousarray(array.data)
        return pb_utils.Tensor._from_wire(expected.name, code, array.shape, byte_view(data), data)
    block, code = block_of(array), _TRITON_CODES[expected.data_type]
    if block is not None:
        shape = list(array.shape)
        return pb_utils.Tensor._from_wire(expected.name, code, shape, block.data, block)
    if code == BYTES:
        return pb_utils.Tensor(expected.name, array)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return pb_utils.Tensor._from_wire(
        expected.name, code, list(array.shape), byte_view(array), array
    )


def _too_small_response(
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

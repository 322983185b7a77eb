"""Joins the tensors of a batch for a framework, and places its outputs in shared memory."""

from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

import pb_utils
from pb_utils import _runtime
from pb_utils._datatypes import BF16, BYTES, CONFIG_CODES, STORAGE
from pb_utils._storage import address_of, array_at, byte_view, read_only_view
from stub.backends.model_contract import ConfiguredTensor, ModelContract
from stub.wire.arena import ArenaFull, Block

MIN_BYTES = 1 << 21
"""Bytes. Copying is faster for smaller outputs: 221 µs against 260 µs for 1 MB, but 1050 µs against
754 µs for 4 MB."""


class OutputBuffer:
    """A block of the stub's own arena, and its address in this process."""

    __slots__ = ("address", "block")

    def __init__(self, block: Block, address: int) -> None:
        self.block = block
        self.address = address


def allocate_output(dtype: Any, shape: Sequence[int]) -> Optional[Any]:
    """Returns a writable array in shared memory; None if the arena is full, or without a stub."""
    allocate = getattr(_runtime.current(), "allocate_output", None)
    if allocate is None:
        return None
    try:
        block, view = allocate(int(np.prod(shape)) * dtype.itemsize)
    except ArenaFull:
        return None  # the later copy reports the error, if the arena is still full
    address = address_of(np.frombuffer(view, np.uint8))
    return array_at(address, dtype, shape, OutputBuffer(block, address), writable=True)


def block_of(array: Any) -> Optional[Block]:
    """Returns the block of an array from `allocate_output`, or of a part; None for other arrays."""
    buffer = _buffer_of(array)
    if buffer is None or not array.flags.c_contiguous:
        return None
    whole, start = buffer.block, address_of(array) - buffer.address
    data = whole.data[start : start + array.nbytes]
    return Block(
        whole.arena, whole.offset + start, array.nbytes, data, partial(_release_part, whole)
    )


def _buffer_of(array: Any) -> Optional[OutputBuffer]:
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    owner = getattr(base, "_owner", None)
    return owner if isinstance(owner, OutputBuffer) else None


def _release_part(whole: Block, arena: int, offset: int) -> None:
    """Does nothing: the partial object that held `whole` alive is deleted with the part."""


Array = Any
"""A numpy array; BF16 is stored in 16-bit integers, BYTES in an object array of `bytes`."""

RunFunction = Callable[[Dict[str, Array], List[str]], Mapping[str, Array]]
"""Runs the model on inputs by name and the names of the wanted outputs; returns at least those."""


class InvalidInput(Exception):
    """A request cannot run because of its inputs; the client gets the text."""


def run_requests(
    requests: Sequence[pb_utils.InferenceRequest], contract: ModelContract, run: RunFunction
) -> List[pb_utils.InferenceResponse]:
    """Runs requests and returns their responses; in one run if the model supports batches.

    InvalidInput becomes an INVALID_ARG error; other exceptions of `run` propagate.
    """
    if len(requests) == 1 and contract.has_only_plain_tensors:
        return [_run_single(requests[0], contract, run)]
    if contract.supports_batching:
        return _run_batch(requests, contract, run)
    return [response for each in requests for response in _run_batch([each], contract, run)]


def _run_single(
    request: pb_utils.InferenceRequest, contract: ModelContract, run: RunFunction
) -> pb_utils.InferenceResponse:
    """Runs one request in fewer steps than `_run_batch`: fast models mostly get only one."""
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
        if len(requests) > 1:  # the other requests are valid
            return [one for each in requests for one in _run_batch([each], contract, run)]
        return [_invalid_arg_response(problem)]


def _invalid_arg_response(problem: InvalidInput) -> pb_utils.InferenceResponse:
    error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)


class RawTensor:
    """A tensor in a layout specific to the model, with an equal number of bytes for each item.

    `shape` includes the batch dimension, but does not determine the number of bytes.
    """

    __slots__ = ("data", "shape")

    def __init__(self, data: Array, shape: Sequence[int]) -> None:
        self.data = data
        self.shape = list(shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions, with the batch dimension."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, items: slice) -> "RawTensor":
        start, end, _ = items.indices(len(self))
        size = len(self.data) // max(1, len(self))
        return RawTensor(self.data[start * size : end * size], [end - start, *self.shape[1:]])


class Batch:
    """One run of a model.

    `inputs` of several requests are new arrays, joined along the first dimension; those of a single
    request are read-only views of the received memory. Ragged inputs are flat. `wanted` are the
    outputs that any request requests. `sizes` are the numbers of items per request.
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
        # (docs/reference/scheduling.md, "Which requests may share a batch").
        self.inputs: Dict[str, Array] = {
            name: self._concatenated_input(name, [each[name] for each in tensors])
            for name in tensors[0]
        }
        requested = set().union(*(each.requested_output_names() for each in requests))
        self.wanted = [name for name in contract.outputs if name in requested]

    def _concatenated_input(self, name: str, tensors: List[pb_utils.Tensor]) -> Array:
        expected = self._contract.inputs.get(name)
        if expected is not None and expected.is_batch_tensor:
            return array_from_tensor(tensors[0])  # all requests have the same tensor
        if expected is not None and expected.is_non_linear:
            return _joined_raw(tensors)
        arrays = [array_from_tensor(tensor) for tensor in tensors]
        if expected is not None and expected.ragged:
            arrays = [array.reshape(-1) for array in arrays]
        if expected is not None and expected.is_shape_tensor and len(arrays) > 1:
            # The scheduler batches shape tensors that are equal but for their first value.
            total = arrays[0].copy()
            total[0] = sum(array[0] for array in arrays)
            return total
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def responses(self, outputs: Mapping[str, Array]) -> List[pb_utils.InferenceResponse]:
        """Returns the responses, over parts of these arrays. Raises TritonModelException."""
        arrays = {name: _checked_output(self._contract, name, outputs) for name in self.wanted}
        responses: List[pb_utils.InferenceResponse] = []
        end = 0
        for request, size in zip(self._requests, self.sizes):
            start, end = end, end + size
            requested = request.requested_output_names()
            selected = {
                name: array
                for name, array in arrays.items()
                # The first response gets outputs of the whole batch; BatchTensors splits them.
                if (
                    not responses
                    if self._contract.outputs[name].is_batch_tensor
                    else name in requested
                )
            }
            responses.append(self._response(request, selected, start, end))
        return responses

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
    """Returns an output of the configured type, a scalar with the configured shape.

    Raises TritonModelException if its data type differs.
    """
    expected, array = contract.outputs[name], outputs[name]
    if expected.is_non_linear:
        return array
    if array.dtype.kind == "U":
        array = array.astype(np.object_)
    code = CONFIG_CODES[expected.data_type]
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
    return 1  # every input was optional and omitted


def decode_texts(name: str, array: Array) -> List[str]:
    """Returns all elements of the input, a BYTES tensor, as texts. Raises InvalidInput."""
    try:
        return [element.decode() for element in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input '{name}' must be text in UTF-8: {error}") from error


def restore_scalars(inputs: Dict[str, Array], scalars: Sequence[str]) -> None:
    """Gives the inputs of scalar tensors zero dimensions: configurations cannot declare that."""
    for name in scalars:
        if name in inputs and inputs[name].shape == (1,):
            inputs[name] = inputs[name].reshape(())


def array_from_tensor(tensor: pb_utils.Tensor) -> Array:
    """Returns a tensor's content, without a copy except for BYTES, which must be decoded."""
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
    """Returns a tensor over the array's memory, by reference if that is in shared memory."""
    if isinstance(array, RawTensor):
        code, data = CONFIG_CODES[expected.data_type], np.ascontiguousarray(array.data)
        return pb_utils.Tensor._from_wire(expected.name, code, array.shape, byte_view(data), data)
    block, code = block_of(array), CONFIG_CODES[expected.data_type]
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
    """Returns the configuration's name of an array's data type, or numpy's if there is none."""
    for name, code in CONFIG_CODES.items():
        if STORAGE[code] == array.dtype:
            return name
    return str(array.dtype)

"""Converts between wire messages and the objects of `pb_utils`."""

from typing import Dict, List, Mapping, Optional, Sequence, cast

import numpy as np

import pb_utils
from pb_utils._model_texts import failed_bls, limit_text
from pb_utils._request_fields import NO_TRACE, InferenceTrace, RequestFields
from pb_utils._response import Responder
from pb_utils._storage import copy_array, copy_into
from stub.memory import SharedMemoryUnavailable, StubMemory
from stub.wire.arena import ArenaFull, Block
from stub.wire.messages import (
    INLINE_ALWAYS,
    OutputPlacement,
    Parameter,
    TraceLink,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)


class ConversionError(Exception):
    """A parameter cannot be encoded, or a tensor cannot be copied from its GPU."""


def tensor_from_wire(wire: WireTensor, memory: StubMemory) -> pb_utils.Tensor:
    """Returns a tensor that shares the received bytes."""
    if wire.data is not None:
        return pb_utils.Tensor._from_wire(
            wire.name, wire.code, wire.shape, memoryview(wire.data), None
        )
    block = memory.import_block(wire)
    return pb_utils.Tensor._from_wire(wire.name, wire.code, wire.shape, block.data, block)


def tensor_to_wire(
    tensor: pb_utils.Tensor, memory: StubMemory, exported: List[Block], tensors: int = 1
) -> WireTensor:
    """Returns the tensor's present bytes for a message, by reference if they are in shared memory.

    `tensors` is the number of tensors in the message. From now on the tensor sends these bytes,
    even if its array changes (docs/reference/model-tensors.md, "When output data is read"). Blocks
    to export to the host with the complete message are added to `exported`.

    Raises ArenaFull, and TritonModelException if the content cannot be copied from a GPU.
    """
    owner = tensor._owner
    region = tensor._unsent_device_memory() if tensor._on_gpu is not None else None
    if region is not None and region.nbytes > INLINE_ALWAYS:
        owner = memory.own.write_with(region.nbytes, tensor._copy_to_host)
        tensor._set_wire_data(owner.data, owner)
    elif not isinstance(owner, Block):
        data = memoryview(tensor._wire_data())
        if data.nbytes <= INLINE_ALWAYS or data.nbytes <= memory.inline_limit(tensors):
            inline = data.tobytes()
            tensor._set_wire_data(memoryview(inline), None)
            return WireTensor(tensor._name, tensor._code, tensor._shape, inline)
        shown = memory.views.unchanged_block_of(tensor._array) if tensor._data is None else None
        owner = shown or memory.write_block(data)
        tensor._set_wire_data(owner.data, owner)
    exported.append(owner)
    return WireTensor(
        tensor._name, tensor._code, tensor._shape, None, owner.arena, owner.offset, owner.size
    )


def request_from_wire(
    wire: WireRequest,
    memory: StubMemory,
    responder: Responder,
    outputs: Sequence[str],
    decoupled: bool = False,
) -> pb_utils.InferenceRequest:
    """Returns an incoming request with these outputs. Raises SharedMemoryUnavailable."""
    inputs = _tensors_from_wire(wire.inputs, memory)
    if decoupled and wire.output_placement is not None:
        _copy_inputs_below_outputs(inputs, wire.output_placement, memory)
    return pb_utils.InferenceRequest._from_wire(
        request_id=wire.id,
        correlation_id=wire.correlation_id,
        inputs=inputs,
        requested_output_names=outputs,
        model_name=wire.model,
        model_version=wire.version,
        flags=wire.flags,
        timeout=wire.timeout,
        parameters=wire.parameters,
        trace=_trace_from_wire(wire.trace),
        handle=responder,
    )


def _tensors_from_wire(wires: Sequence[WireTensor], memory: StubMemory) -> List[pb_utils.Tensor]:
    tensors: List[pb_utils.Tensor] = []
    gone: Optional[SharedMemoryUnavailable] = None
    for wire in wires:  # import all, so that all blocks are released
        try:
            tensors.append(tensor_from_wire(wire, memory))
        except SharedMemoryUnavailable as error:
            gone = error
    if gone is not None:
        raise gone
    return tensors


def _copy_inputs_below_outputs(
    inputs: Sequence[pb_utils.Tensor], places: Mapping[str, OutputPlacement], memory: StubMemory
) -> None:
    """Copies inputs that lie where the client wants outputs of the same request.

    A decoupled model may use an input after its first response was written there.
    """
    targets = [memory.placement_bytes(place) for place in places.values()]
    for tensor in inputs:
        data = memoryview(tensor._wire_data())
        lies = memory.region_bytes(data)
        if lies is not None and any(target and lies.overlaps(target) for target in targets):
            tensor._set_wire_data(copy_array(np.frombuffer(data, np.uint8)).data, None)


def request_to_wire(request: RequestFields, memory: StubMemory) -> WireRequest:
    """Returns an outgoing (BLS) request, whose blocks are exported.

    Raises ArenaFull or ConversionError; nothing is exported then.
    """
    exported: List[Block] = []
    parameters = _request_parameters(request)
    try:
        count = len(request._inputs)
        inputs = [tensor_to_wire(tensor, memory, exported, count) for tensor in request._inputs]
    except pb_utils.TritonModelException as problem:
        raise ConversionError(str(problem)) from problem
    memory.export_blocks(exported)
    return _wire_request(request, inputs, parameters)


def request_to_wire_inline(request: RequestFields) -> WireRequest:
    """Returns an outgoing request with all bytes inline, for a process without its own arena.

    Raises ConversionError.
    """
    try:
        inputs = [_inline_wire_tensor(tensor) for tensor in request._inputs]
    except pb_utils.TritonModelException as problem:
        raise ConversionError(str(problem)) from problem
    return _wire_request(request, inputs, _request_parameters(request))


def place_inputs_in_arena(wire: WireRequest, memory: StubMemory) -> WireRequest:
    """Moves the large inputs of a request with inline bytes into the arena. Raises ArenaFull."""
    exported: List[Block] = []
    for index, tensor in enumerate(wire.inputs):
        if tensor.data is not None and len(tensor.data) > INLINE_ALWAYS:
            block = memory.write_block(memoryview(tensor.data))
            exported.append(block)
            wire.inputs[index] = WireTensor(
                tensor.name, tensor.code, tensor.shape, None, block.arena, block.offset, block.size
            )
    memory.export_blocks(exported)
    return wire


def _wire_request(
    request: RequestFields,
    inputs: List[WireTensor],
    parameters: Dict[str, Parameter],
) -> WireRequest:
    trace = request._trace
    return WireRequest(
        request._request_id,
        inputs,
        list(request._requested_output_names),
        parameters,
        request._correlation_id,
        request._flags,
        request._timeout,
        request._model_name,
        request._model_version,
        None if trace is NO_TRACE else TraceLink(trace._number, trace._context),
    )


def _trace_from_wire(link: Optional[TraceLink]) -> InferenceTrace:
    return NO_TRACE if link is None else InferenceTrace._from_wire(link.context, link.number)


def response_from_wire(
    wire: WireResponse, memory: StubMemory, preferred: Optional[pb_utils.PreferredMemory] = None
) -> pb_utils.InferenceResponse:
    """Returns the response to a BLS request, with its outputs in the preferred memory.

    It becomes an error if shared memory of an output is gone: no thread has to expect an exception.
    """
    if wire.error is not None:
        code = pb_utils.TritonError.ErrorCode(wire.error.code)
        error = pb_utils.TritonError(wire.error.message, code)
        return pb_utils.InferenceResponse._from_wire([], error, None)
    try:
        outputs = _tensors_from_wire(wire.outputs, memory)
    except SharedMemoryUnavailable as gone:
        return pb_utils.InferenceResponse._from_wire([], pb_utils.TritonError(str(gone)), None)
    if preferred is not None and preferred._type is pb_utils.TRITONSERVER_MEMORY_GPU:
        for output in outputs:
            output._prefer_gpu(preferred._device_id)
    return pb_utils.InferenceResponse._from_wire(outputs, None, wire.parameters)


def inline_wire_response(wire: WireResponse, memory: StubMemory) -> WireResponse:
    """Returns a response with all bytes inline, for a process that cannot read the blocks.

    It becomes an error if shared memory of an output is gone.
    """
    try:
        tensors = _tensors_from_wire(wire.outputs, memory)
    except SharedMemoryUnavailable as gone:
        return error_response(str(gone))
    outputs = [_inline_wire_tensor(tensor) for tensor in tensors]
    return WireResponse(outputs, wire.parameters, wire.error)


def _inline_wire_tensor(tensor: pb_utils.Tensor) -> WireTensor:
    return WireTensor(tensor._name, tensor._code, tensor._shape, bytes(tensor._wire_data()))


def response_to_wire(
    response: pb_utils.InferenceResponse,
    requested: Sequence[str],
    memory: StubMemory,
    exported: List[Block],
    output_placement: Optional[Mapping[str, OutputPlacement]] = None,
) -> WireResponse:
    """Returns a model's response with its requested outputs; `exported` as in `tensor_to_wire`.

    Outputs in `output_placement` are written to the client's memory if they fit. If shared memory
    is full, only this response becomes an error.
    """
    error = response._error
    if error is not None:
        return error_response(error.message(), int(error.code()))
    own: List[Block] = []
    try:
        parameters = _encodable_parameters(response._parameters)
        count = len(response._output_tensors)
        tensors = [tensor for tensor in response._output_tensors if tensor._name in requested]
        if output_placement is not None:
            _copy_overwritten_outputs(tensors, output_placement, memory)
        outputs = [
            _write_to_client_memory(tensor, output_placement[tensor._name], memory, own)
            if output_placement is not None and tensor._name in output_placement
            else tensor_to_wire(tensor, memory, own, count)
            for tensor in tensors
        ]
    except ArenaFull as full:
        return error_response(arena_full_message(full))
    except (ConversionError, pb_utils.TritonModelException) as problem:
        return error_response(str(problem))
    exported.extend(own)
    return WireResponse(outputs, parameters)


def _copy_overwritten_outputs(
    tensors: Sequence[pb_utils.Tensor], places: Mapping[str, OutputPlacement], memory: StubMemory
) -> None:
    """Copies outputs that lie where the outputs of the same response will be written.

    A model may return an input, or an array over its memory, and a client may want outputs where
    its inputs lie. Arrays that are mapped copy-on-write need no copy here.
    """
    targets = {name: memory.placement_bytes(place) for name, place in places.items()}
    for tensor in tensors:
        array = tensor._array if tensor._data is None else None
        if tensor._unsent_device_memory() is not None or (array is not None and array.base is None):
            continue  # in memory of its own
        data = memoryview(tensor._wire_data())
        lies = memory.region_bytes(data)
        if lies is None or lies.begins_with(targets.get(tensor._name)):
            continue  # not in a client's memory, or at its place already
        if any(target is not None and lies.overlaps(target) for target in targets.values()):
            block = memory.write_block(data)
            tensor._set_wire_data(block.data, block)


def _write_to_client_memory(
    tensor: pb_utils.Tensor, placement: OutputPlacement, memory: StubMemory, exported: List[Block]
) -> WireTensor:
    """Writes an output to a client's memory; if it is too small, does as `tensor_to_wire`."""
    region = tensor._unsent_device_memory()
    data = memoryview(tensor._wire_data()) if region is None else memoryview(b"")
    arena, offset, _ = placement
    size = data.nbytes if region is None else region.nbytes
    place = memory.output_buffer(size, placement)
    if place is None:
        # The host handles an output that does not fit.
        return tensor_to_wire(tensor, memory, exported)
    if region is None:
        copy_into(place, data)
    else:
        tensor._copy_to_host(place)
    return WireTensor(tensor._name, tensor._code, tensor._shape, None, arena, offset, size)


def error_response(text: str, code: int = int(pb_utils.TritonError.INTERNAL)) -> WireResponse:
    """Returns an error response of limited length; `code` is a number of `TritonError`."""
    return WireResponse([], {}, WireError(code, limit_text(text)))


def _encodable_parameters(parameters: Optional[Mapping[str, object]]) -> Dict[str, Parameter]:
    """Returns the parameters if they can be encoded. Raises ConversionError.

    The types of their values were checked when the request or response was created.
    """
    if not parameters:
        return {}
    for name, value in parameters.items():
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError as error:
            raise ConversionError(
                f"Parameter {name!r} is not valid text: {error.reason}"
            ) from error
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConversionError(
                f"Unsupported value type on parameters: '{name}' is {value}, which does not fit"
                " 64 bits with sign"
            )
    return cast(Dict[str, Parameter], dict(parameters))


def _request_parameters(request: RequestFields) -> Dict[str, Parameter]:
    """Returns the parameters for the wire.

    Raises ConversionError, which names the model (docs/reference/model-bls.md, "Errors").
    """
    try:
        return _encodable_parameters(request._parameters)
    except ConversionError as problem:
        raise ConversionError(failed_bls(request._model_name, str(problem))) from problem


def arena_full_message(full: ArenaFull) -> str:
    """Returns the documented text, then advice.

    The text is in docs/reference/model-processes.md, "Options and shared memory".
    """
    return (
        "Failed to increase the shared memory pool size for key 'pbhost-stub' to"
        f" {full.used + full.requested} bytes. Error: {full};"
        " raise --arena-byte-size or return smaller tensors"
    )

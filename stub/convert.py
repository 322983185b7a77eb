"""Between messages and what a model author sees."""

from typing import Dict, List, Mapping, Optional, Sequence, cast

import pb_utils
from pb_utils._copying import copy_into
from pb_utils._sender import Exchange
from pb_utils._trace import NO_TRACE, InferenceTrace
from stub.memory import Memory, MemoryGone
from stub.wire.arena import ArenaFull, Block
from stub.wire.payload import (
    INLINE_ALWAYS,
    Parameter,
    Slot,
    TraceLink,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)


class Unsendable(Exception):
    """A parameter that no message can carry, or a tensor that a GPU does not give."""


def tensor_from(wire: WireTensor, memory: Memory) -> pb_utils.Tensor:
    """A tensor over the bytes where they lie."""
    if wire.data is not None:
        return pb_utils.Tensor._from_wire(
            wire.name, wire.code, wire.shape, memoryview(wire.data), None
        )
    block = memory.borrow(wire)
    return pb_utils.Tensor._from_wire(wire.name, wire.code, wire.shape, block.data, block)


def tensor_to(
    tensor: pb_utils.Tensor, memory: Memory, placed: List[Block], tensors: int = 1
) -> WireTensor:
    """The tensor's bytes as they are now, by reference if they already lie in shared memory.

    It is one of so many `tensors` of a message.

    From here on the tensor sends these same bytes, whatever happens to its array (pb_utils spec
    4.2). Blocks that the host must be lent when the message is complete are added to `placed`.
    Raises ArenaFull, and TritonModelException if the content cannot be copied from a GPU.
    """
    owner = tensor._owner
    region = tensor._uncaptured() if tensor._on_gpu is not None else None
    if region is not None and region.nbytes > INLINE_ALWAYS:
        owner = memory.place_from(region.nbytes, tensor._fetch)
        tensor._adopt(owner.data, owner)
    elif not isinstance(owner, Block):
        data = memoryview(tensor._wire_data())
        if data.nbytes <= INLINE_ALWAYS or data.nbytes <= memory.most_inline(tensors):
            inline = data.tobytes()
            tensor._adopt(memoryview(inline), None)
            return WireTensor(tensor._name, tensor._code, tensor._shape, inline)
        shown = memory.snapshots.block_of(tensor._array) if tensor._data is None else None
        owner = shown or memory.place(data)
        tensor._adopt(owner.data, owner)
    placed.append(owner)
    return WireTensor(
        tensor._name, tensor._code, tensor._shape, None, owner.arena, owner.offset, owner.size
    )


def request_from(
    wire: WireRequest, memory: Memory, exchange: Exchange, outputs: Sequence[str]
) -> pb_utils.InferenceRequest:
    """An incoming request, which wants these outputs. Raises MemoryGone."""
    return pb_utils.InferenceRequest._from_wire(
        request_id=wire.id,
        correlation_id=wire.correlation_id,
        inputs=_inputs_from(wire.inputs, memory),
        requested_output_names=outputs,
        model_name=wire.model,
        model_version=wire.version,
        flags=wire.flags,
        timeout=wire.timeout,
        parameters=wire.parameters,
        trace=NO_TRACE if wire.trace is None else _trace_from(wire.trace),
        handle=exchange,
    )


def _inputs_from(wires: Sequence[WireTensor], memory: Memory) -> List[pb_utils.Tensor]:
    tensors: List[pb_utils.Tensor] = []
    gone: Optional[MemoryGone] = None
    for wire in wires:  # all of them: what was lent with the others is given back, too
        try:
            tensors.append(tensor_from(wire, memory))
        except MemoryGone as error:
            gone = error
    if gone is not None:
        raise gone
    return tensors


def request_to(request: pb_utils.InferenceRequest, memory: Memory) -> WireRequest:
    """An outgoing (BLS) request. Raises ArenaFull or Unsendable, and has then lent nothing."""
    placed: List[Block] = []
    parameters = _request_parameters(request)
    try:
        count = len(request._inputs)
        inputs = [tensor_to(tensor, memory, placed, count) for tensor in request._inputs]
    except pb_utils.TritonModelException as problem:
        raise Unsendable(str(problem)) from problem
    memory.tell(placed)
    return _request(request, inputs, parameters)


def request_inline(request: pb_utils.InferenceRequest) -> WireRequest:
    """An outgoing request with all its bytes, for a process without memory to place them in.

    Raises Unsendable.
    """
    try:
        inputs = [
            WireTensor(tensor._name, tensor._code, tensor._shape, bytes(tensor._wire_data()))
            for tensor in request._inputs
        ]
    except pb_utils.TritonModelException as problem:
        raise Unsendable(str(problem)) from problem
    return _request(request, inputs, _request_parameters(request))


def localised(wire: WireRequest, memory: Memory) -> WireRequest:
    """A request that came with all its bytes, as one of this process. Raises ArenaFull."""
    placed: List[Block] = []
    for index, tensor in enumerate(wire.inputs):
        if tensor.data is not None and len(tensor.data) > INLINE_ALWAYS:
            block = memory.place(memoryview(tensor.data))
            placed.append(block)
            wire.inputs[index] = WireTensor(
                tensor.name, tensor.code, tensor.shape, None, block.arena, block.offset, block.size
            )
    memory.tell(placed)
    return wire


def _request(
    request: pb_utils.InferenceRequest,
    inputs: List[WireTensor],
    parameters: Dict[str, Parameter],
) -> WireRequest:
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
        None if request._trace is NO_TRACE else _trace_to(request._trace),
    )


def _trace_from(link: TraceLink) -> InferenceTrace:
    return InferenceTrace._from_wire(link.context, link.number)


def _trace_to(trace: InferenceTrace) -> TraceLink:
    return TraceLink(trace._number, trace._context)


def response_from(
    wire: WireResponse, memory: Memory, preferred: Optional[pb_utils.PreferredMemory] = None
) -> pb_utils.InferenceResponse:
    """The answer to a BLS request, in the memory that is preferred for its outputs."""
    if wire.error is not None:
        code = pb_utils.TritonError.ErrorCode(wire.error.code)
        error = pb_utils.TritonError(wire.error.message, code)
        return pb_utils.InferenceResponse._from_wire([], error, None)
    outputs = [tensor_from(tensor, memory) for tensor in wire.outputs]
    if preferred is not None and preferred._type is pb_utils.TRITONSERVER_MEMORY_GPU:
        for output in outputs:
            output._prefer_gpu(preferred._device_id)
    return pb_utils.InferenceResponse._from_wire(outputs, None, wire.parameters)


def response_inline(wire: WireResponse, memory: Memory) -> WireResponse:
    """An answer with all its bytes, for a process that cannot read where they lie."""
    outputs = [
        tensor
        if tensor.data is not None
        else WireTensor(tensor.name, tensor.code, tensor.shape, bytes(memory.borrow(tensor).data))
        for tensor in wire.outputs
    ]
    return WireResponse(outputs, wire.parameters, wire.error)


def response_to(
    response: pb_utils.InferenceResponse,
    requested: Sequence[str],
    memory: Memory,
    placed: List[Block],
    slots: Optional[Mapping[str, Slot]] = None,
) -> WireResponse:
    """A model's answer, without the outputs that nobody asked for; `placed` as in `tensor_to`.

    Those in `slots` are written there if they fit. What does not fit into shared memory becomes an
    error of this response alone.
    """
    error = response._error
    if error is not None:
        return WireResponse([], {}, WireError(int(error.code()), error.message()))
    own: List[Block] = []
    try:
        parameters = _parameters(response._parameters)
        count = len(response._output_tensors)
        outputs = [
            _put(tensor, slots[tensor._name], memory, own)
            if slots is not None and tensor._name in slots
            else tensor_to(tensor, memory, own, count)
            for tensor in response._output_tensors
            if tensor._name in requested
        ]
    except ArenaFull as full:
        return failed(no_room(full))
    except (Unsendable, pb_utils.TritonModelException) as problem:
        return failed(str(problem))
    placed.extend(own)
    return WireResponse(outputs, parameters)


def _put(tensor: pb_utils.Tensor, slot: Slot, memory: Memory, placed: List[Block]) -> WireTensor:
    """Write an output into a client's memory; as `tensor_to` if the client left too little."""
    region = tensor._uncaptured()
    data = memoryview(tensor._wire_data()) if region is None else memoryview(b"")
    arena, offset, _ = slot
    size = data.nbytes if region is None else region.nbytes
    place = memory.room(size, slot)
    if place is None:
        return tensor_to(tensor, memory, placed)  # the host knows what that means
    if region is None:
        copy_into(place, data)
    else:
        tensor._fetch(place)
    return WireTensor(tensor._name, tensor._code, tensor._shape, None, arena, offset, size)


def failed(text: str) -> WireResponse:
    """An answer that says that the model, or the host, has failed."""
    return WireResponse([], {}, WireError(int(pb_utils.TritonError.INTERNAL), text))


def _parameters(parameters: Optional[Mapping[str, object]]) -> Dict[str, Parameter]:
    """As they travel. Raises Unsendable.

    The types of the values were checked when the request or response was made.
    """
    if not parameters:
        return {}
    for name, value in parameters.items():
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError as error:
            raise Unsendable(f"Parameter {name!r} is no valid text: {error.reason}") from error
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise Unsendable(
                f"Unsupported value type on parameters: '{name}' is {value}, which does not fit"
                " 64 bits with sign"
            )
    return cast(Dict[str, Parameter], dict(parameters))


def _request_parameters(request: pb_utils.InferenceRequest) -> Dict[str, Parameter]:
    """As they travel. Raises Unsendable, saying which model was not asked (pb_utils spec 5.3)."""
    try:
        return _parameters(request._parameters)
    except Unsendable as problem:
        raise Unsendable(
            f"Model {request._model_name} - Error when running inference: {problem}"
        ) from problem


def no_room(full: ArenaFull) -> str:
    """The documented text (pb_utils spec 6.1), and behind it what would help."""
    return (
        f"Failed to increase the shared memory pool size to {full.used + full.asked} bytes. "
        f"Error: {full}; raise --arena-byte-size or return smaller tensors"
    )

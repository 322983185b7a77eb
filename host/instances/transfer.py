"""Converts tensors, requests and responses between the host's form and messages of one stub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from host.errors import ErrorCode, HostError
from host.inference.request import (
    InferRequest,
    InferResponse,
    SharedMemoryBytes,
    Tensor,
    copy_from_shared_memory,
)
from host.instances.arenas import ArenaFile, Arenas, ProcessMemory, arena_full_error
from host.instances.regions import is_in_place
from pb_utils._datatypes import CODES, NAMES
from stub.wire.arena import ArenaFull, Block
from stub.wire.messages import (
    INLINE_ALWAYS,
    INLINE_LIMIT,
    CloseArena,
    OutputPlacement,
    ToStub,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)

WORK, BLS = "work", "BLS responses"
"""The rings to a stub whose frames contain tensors."""

# TritonError codes by number.  Source: docs/reference/model-module.md, "Errors".
_ERRORS = (
    ErrorCode.UNKNOWN,
    ErrorCode.INTERNAL,
    ErrorCode.NOT_FOUND,
    ErrorCode.INVALID_ARG,
    ErrorCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED,
    ErrorCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED,
)
_ERROR_NUMBERS = {code: number for number, code in enumerate(_ERRORS)}


class TensorTransfer(ProcessMemory):
    """The tensors exchanged with one stub, and the blocks that each side still references."""

    def __init__(
        self,
        arenas: Arenas,
        stub_arena: ArenaFile,
        flush: Callable[[], None],
        close_arena: Callable[[CloseArena], None],
        inline_limit: Callable[[], int] = lambda: INLINE_LIMIT,
        bls_inline_limit: Callable[[], int] = lambda: INLINE_LIMIT,
    ) -> None:
        """`inline_limit`: returns the bytes of tensors that the next frame of work may contain.

        `bls_inline_limit` does so for the next frame of BLS responses.
        """
        # Different threads of the stub read these rings.
        super().__init__(arenas, stub_arena, flush, close_arena, (WORK, BLS))
        self._inline_limit = inline_limit
        self._bls_inline_limit = bls_inline_limit

    # To the stub

    def encode_request(
        self, request: InferRequest, ring: str, frame: list[ToStub], batch_requests: int = 1
    ) -> WireRequest:
        """Converts a request of a batch of `batch_requests`; adds announcements to `frame`.

        Raises ArenaFull; after this and any other error, it has exported nothing, and the trace of
        the request has not started its compute span.
        """
        inputs = request.inputs
        for tensor in inputs:
            if len(tensor.data) > INLINE_ALWAYS and not isinstance(tensor.owner, Block):
                self._place_in_shared_memory(inputs, ring, batch_requests)
                break
        if request.reserved_memory is not None:
            _release_message(request)
        wanted = request.output_placement or request.output_placement_hints
        placement = self._encode_output_placement(wanted, ring, frame) if wanted else None
        encoded: list[WireTensor] = []
        try:
            for tensor in inputs:
                encoded.append(  # noqa: PERF401 - the list is complete up to an error
                    WireTensor(tensor.name, CODES[tensor.datatype], tensor.shape, tensor.data)  # type: ignore[arg-type]
                    if tensor.owner is None
                    else self._encode_tensor(tensor, ring, frame)
                )
        except Exception:  # ArenaFull, or a defect: either way, the caller gets no blocks
            for wire in encoded:
                if wire.data is None:
                    self._exported.release_block(wire.arena, wire.offset, 1)
            raise
        return WireRequest(
            request.id,
            encoded,
            request.requested_outputs,
            request.parameters,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.model_name,
            request.model_version,
            None if request.trace is None else request.trace.start_compute(),  # last
            placement,
            request.max_outstanding_responses,
        )

    def encode_response(
        self, response: InferResponse, ring: str, frame: list[ToStub]
    ) -> WireResponse:
        """Converts a response; if it does not fit into memory, into an error."""
        error = response.error
        if error is None:
            try:
                for output in response.outputs:
                    if len(output.data) > INLINE_ALWAYS:
                        self._place_in_shared_memory(response.outputs, ring)
                        break
            except ArenaFull as full:
                error = arena_full_error(full)
            else:
                outputs = [self._encode_tensor(output, ring, frame) for output in response.outputs]
                return WireResponse(outputs, response.parameters)
        return WireResponse([], {}, WireError(_ERROR_NUMBERS[error.code], error.message))

    def _place_in_shared_memory(
        self, tensors: Sequence[Tensor], ring: str, batch_requests: int = 1
    ) -> None:
        """Moves tensors that are too long for a message to shared memory. Raises ArenaFull."""
        room = self._inline_limit if ring == WORK else self._bls_inline_limit
        limit = room() // batch_requests
        if _movable_bytes(tensors) <= limit:
            return
        limit = max(INLINE_ALWAYS, limit // len(tensors))
        for tensor in tensors:
            self._arenas.place_tensor(tensor, limit)

    def _encode_tensor(self, tensor: Tensor, ring: str, frame: list[ToStub]) -> WireTensor:
        """Converts a tensor and exports its block: nothing may fail after that."""
        code = CODES[tensor.datatype]
        block = tensor.owner
        if not isinstance(block, Block):
            return WireTensor(tensor.name, code, tensor.shape, bytes(tensor.data))
        if block.arena not in self._announced[ring]:
            self._announce_arena(block.arena, ring, frame)
        self._exported.export_block(block)
        self._arenas.received.exported(block)
        return WireTensor(
            tensor.name, code, tensor.shape, None, block.arena, block.offset, block.size
        )

    def _announce_arena(self, arena: int, ring: str, frame: list[ToStub]) -> None:
        announced = self._announced[ring]
        if arena not in announced:
            frame.append(self._arenas.announcement(arena))
            announced.add(arena)

    def _encode_output_placement(
        self, wanted: Mapping[str, object], ring: str, frame: list[ToStub]
    ) -> dict[str, OutputPlacement]:
        placements: dict[str, OutputPlacement] = {}
        for name, block in wanted.items():
            assert isinstance(block, Block)
            self._announce_arena(block.arena, ring, frame)
            placements[name] = block.arena, block.offset, block.size
        return placements

    # From the stub

    def decode_tensor(self, wire: WireTensor) -> Tensor:
        """Converts a tensor. Raises ValueError or KeyError for an invalid reference."""
        datatype = NAMES[wire.code]
        if wire.data is not None:
            return Tensor(wire.name, datatype, wire.shape, wire.data)
        block: Block
        region = self._arenas.region(wire.arena)
        if region is not None and any(
            wire.arena in announced for announced in self._announced.values()
        ):
            block = region.block(wire.offset, wire.size)
        elif self._file is not None and wire.arena == self._number:
            block = self._file.block(wire.offset, wire.size)
        else:
            block = self._exported.find_block(wire.arena, wire.offset)
            if block.size != wire.size:
                raise ValueError(f"a lent block of {block.size} bytes was returned as {wire.size}")
        data = (
            block.data
            if type(block) is Block or not isinstance(block, SharedMemoryBytes)
            else block
        )
        return Tensor(wire.name, datatype, wire.shape, data, block)

    def decode_outputs(
        self, outputs: Sequence[WireTensor], wanted: Mapping[str, object] | None
    ) -> list[Tensor]:
        """Converts outputs, in memory of the client or not. Raises HostError, and as
        `decode_tensor`.
        """
        tensors: list[Tensor] = []
        for wire in outputs:
            if wire.data is not None:
                tensors.append(Tensor(wire.name, NAMES[wire.code], wire.shape, wire.data))
                continue
            tensor = self.decode_tensor(wire)
            if wanted is not None and is_in_place(tensor, wanted.get(wire.name)):
                tensor.data = b""
            else:
                # An output elsewhere in a client's region is an input that the model has passed on.
                # The host must not read memory that the client may take away.
                tensor = copy_from_shared_memory(tensor)
            tensors.append(tensor)
        return tensors

    def decode_request(self, wire: WireRequest) -> InferRequest:
        """Converts a BLS request. Raises as `decode_tensor`."""
        return InferRequest(
            model_name=wire.model,
            inputs=[self.decode_tensor(tensor) for tensor in wire.inputs],
            model_version=wire.version,
            id=wire.id,
            requested_outputs=wire.outputs,
            parameters=wire.parameters,
            correlation_id=wire.correlation_id,
            flags=wire.flags,
            timeout_us=wire.timeout,
        )

    def decode_error(self, wire: WireError) -> HostError:
        """Converts the error of a response."""
        return HostError(_ERRORS[wire.code], wire.message)


def _movable_bytes(tensors: Sequence[Tensor]) -> int:
    """The bytes of tensors that are not in shared memory of the host or of a stub."""
    size = 0
    for tensor in tensors:
        if tensor.owner is None or not isinstance(tensor.owner, Block):
            size += len(tensor.data)
    return size


def _release_message(request: InferRequest) -> None:
    """Releases the memory of the received message: its large tensors are in shared memory."""
    for tensor in request.inputs:
        if tensor.owner is None and isinstance(tensor.data, memoryview):
            tensor.data = bytes(tensor.data)  # a view would keep the whole message
    request.reserved_memory = None

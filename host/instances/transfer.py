"""Tensors, requests and responses between the host's own form and one stub's messages."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from host.errors import ErrorCode, HostError, internal
from host.inference.request import InferRequest, InferResponse, Tensor, copy_from_shared_memory
from host.inference.shared_memory_bytes import SharedMemoryBytes
from host.instances.arenas import ArenaFile, Arenas
from host.instances.channel import WORK
from host.instances.client_memory import is_in_place
from stub.wire.arena import ArenaFull, Block, BlockReferences
from stub.wire.datatypes import CODES, NAMES
from stub.wire.messages import (
    BlockRelease,
    ToStub,
)
from stub.wire.payload import (
    INLINE_ALWAYS,
    INLINE_LIMIT,
    OutputPlacement,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)

# Numbers of TritonError codes (pb_utils spec 3.11), in order.
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


class TensorTransfer:
    """The traffic of tensors with one stub: what it was lent, and what it must get back."""

    def __init__(
        self,
        arenas: Arenas,
        stub_arena: ArenaFile,
        release_timer: ReleaseTimer,
        inline_limit: Callable[[], int] = lambda: INLINE_LIMIT,
    ) -> None:
        """`inline_limit` is how many bytes of tensors the next frame of work may carry."""
        self._arenas = arenas
        self._inline_limit = inline_limit
        # The stub's arena; when the stub is gone, it lives as long as a block in it.
        self._stub_arena: ArenaFile | None = stub_arena
        self._stub_arena_number = stub_arena.number
        self._exported = BlockReferences()
        stub_arena.set_drop_handler(release_timer.schedule)
        # By socket: each is read by another thread of the stub, so each must announce arenas.
        self._announced: dict[bytes, set[int]] = {}

    @property
    def arena(self) -> ArenaFile:
        """The stub's, as long as it has not ended."""
        assert self._stub_arena is not None
        return self._stub_arena

    # To the stub

    def encode_request(
        self, request: InferRequest, socket: bytes, frame: list[ToStub], batch_requests: int = 1
    ) -> WireRequest:
        """A request for a message that carries so many of them; announcements that must precede it
        are put into `frame`.

        Raises ArenaFull, and has then lent nothing.
        """
        inputs = request.inputs
        for tensor in inputs:
            if len(tensor.data) > INLINE_ALWAYS:
                self._place_in_shared_memory(inputs, socket, batch_requests)
                break
        return WireRequest(
            request.id,
            [
                WireTensor(
                    tensor.name, CODES[tensor.datatype], tensor.shape, cast(bytes, tensor.data)
                )
                if tensor.owner is None
                else self._encode_tensor(tensor, socket, frame)
                for tensor in inputs
            ],
            request.requested_outputs,
            request.parameters,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.model_name,
            request.model_version,
            None if request.trace is None else request.trace.start_compute(),
            self._encode_output_placement(
                request.output_placement or request.output_placement_hints, socket, frame
            ),
            request.max_outstanding_responses,
        )

    def fits_inline(self, request: InferRequest) -> bool:
        """Whether nothing of the request has to be put into shared memory for the stub."""
        size = 0
        for tensor in request.inputs:
            if tensor.owner is None:
                size += len(tensor.data)
        return size <= INLINE_ALWAYS or size <= self._inline_limit()

    def encode_response(
        self, response: InferResponse, socket: bytes, frame: list[ToStub]
    ) -> WireResponse:
        """A response for a message; what does not fit into memory becomes an error."""
        error = response.error
        if error is None:
            try:
                self._place_in_shared_memory(response.outputs, socket)
            except ArenaFull as full:
                error = arena_full_error(full)
            else:
                outputs = [
                    self._encode_tensor(output, socket, frame) for output in response.outputs
                ]
                return WireResponse(outputs, response.parameters)
        return WireResponse([], {}, WireError(_ERROR_NUMBERS[error.code], error.message))

    def _place_in_shared_memory(
        self, tensors: Sequence[Tensor], socket: bytes, batch_requests: int = 1
    ) -> None:
        """Put what is too long for a message into shared memory. Raises ArenaFull."""
        limit = INLINE_ALWAYS
        if socket == WORK:  # what the ring carries; other messages leave room for each other
            limit = max(limit, self._inline_limit() // (batch_requests * max(1, len(tensors))))
        for tensor in tensors:
            self._arenas.place_tensor(tensor, limit)

    def _encode_tensor(self, tensor: Tensor, socket: bytes, frame: list[ToStub]) -> WireTensor:
        """The tensor for a message. A block is lent with it: nothing may fail after that."""
        code = CODES[tensor.datatype]
        block = tensor.owner
        if not isinstance(block, Block):
            return WireTensor(tensor.name, code, tensor.shape, bytes(tensor.data))
        if block.arena not in (0, self._stub_arena_number):
            self._announce_arena(block.arena, socket, frame)
        self._exported.export_block(block)
        return WireTensor(
            tensor.name, code, tensor.shape, None, block.arena, block.offset, block.size
        )

    def _announce_arena(self, arena: int, socket: bytes, frame: list[ToStub]) -> None:
        announced = self._announced.setdefault(socket, set())
        if arena not in announced:
            announced.add(arena)
            frame.append(self._arenas.announcement(arena))

    def _encode_output_placement(
        self, wanted: Mapping[str, object] | None, socket: bytes, frame: list[ToStub]
    ) -> dict[str, OutputPlacement] | None:
        if not wanted:
            return None
        placements: dict[str, OutputPlacement] = {}
        for name, block in wanted.items():
            assert isinstance(block, Block)
            self._announce_arena(block.arena, socket, frame)
            placements[name] = block.arena, block.offset, block.size
        return placements

    # From the stub

    def decode_tensor(self, wire: WireTensor) -> Tensor:
        """A tensor of a message. Raises ValueError or KeyError for a reference that is none."""
        datatype = NAMES[wire.code]
        if wire.data is not None:
            return Tensor(wire.name, datatype, wire.shape, wire.data)
        block: Block
        region = self._arenas.region(wire.arena)
        if region is not None and any(
            wire.arena in announced for announced in self._announced.values()
        ):
            block = region.block(wire.offset, wire.size)
        elif self._stub_arena is not None and wire.arena == self._stub_arena_number:
            block = self._stub_arena.block(wire.offset, wire.size)
        else:
            block = self._exported.find_block(wire.arena, wire.offset)
            if block.size != wire.size:
                raise ValueError(f"a lent block of {block.size} bytes came back as {wire.size}")
        data = block if isinstance(block, SharedMemoryBytes) else block.data
        return Tensor(wire.name, datatype, wire.shape, data, block)

    def decode_output(self, wire: WireTensor, wanted: Mapping[str, object] | None) -> Tensor:
        """An output, `wanted` in the client's memory or not; raises HostError and `decode_tensor`.

        Elsewhere in there lies an input that the model has passed on. It is copied: the host, which
        will read the bytes, must not touch memory that the client may take away.
        """
        tensor = self.decode_tensor(wire)
        if tensor.owner is None:
            return tensor
        if wanted is not None and is_in_place(tensor, wanted.get(wire.name)):
            return Tensor(tensor.name, tensor.datatype, tensor.shape, b"", tensor.owner)
        return copy_from_shared_memory(tensor)

    def decode_request(self, wire: WireRequest) -> InferRequest:
        """A BLS request. Raises as `decode_tensor`."""
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
        """An error of a response."""
        return HostError(_ERRORS[wire.code], wire.message)

    # Bookkeeping

    def release_blocks(self, message: BlockRelease) -> None:
        """The stub is done with blocks it was lent. Raises KeyError for what it was not lent."""
        for arena, offset, count in message.blocks:
            self._exported.release_block(arena, offset, count)

    def collect_releases(self) -> BlockRelease | None:
        """The stub's own blocks that the host is done with, as a message."""
        if self._stub_arena is None or not self._stub_arena.dropped:
            return None
        dropped = self._stub_arena.dropped
        counts: Counter[int] = Counter()
        while dropped:
            counts[dropped.popleft()] += 1
        number = self._stub_arena_number
        return BlockRelease([(number, offset, count) for offset, count in counts.items()])

    def forget_arena(self, arena: int) -> bool:
        """An arena is gone; whether the stub knew of it."""
        known = False
        for announced in self._announced.values():
            if arena in announced:
                announced.discard(arena)
                known = True
        return known

    def stub_exited(self) -> None:
        """The stub is gone: nothing is lent any more."""
        self._exported.release_all()
        if self._stub_arena is not None:
            self._stub_arena.set_drop_handler(None)
            self._stub_arena = None


class ReleaseTimer:
    """Has `flush` called soon in the loop, from whichever thread dropped the last reference.

    Not at once: the next batch usually comes first and carries the returns along.
    """

    _DELAY = 0.02

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._scheduled = False
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def schedule(self) -> None:
        """Something is due."""
        if self._scheduled or self._loop.is_closed():
            return
        self._scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_later(self._DELAY, self._run)
        else:
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self._flush()


def arena_full_error(full: ArenaFull) -> HostError:
    """The documented text (pb_utils spec 6.1), and behind it what would help."""
    return internal(
        f"Failed to increase the shared memory pool size to {full.used + full.requested} bytes. "
        f"Error: {full}; raise --arena-byte-size or send smaller tensors"
    )

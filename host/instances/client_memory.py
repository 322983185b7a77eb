"""Writes outputs into client-registered shared memory."""

from __future__ import annotations

from collections.abc import Mapping

from host.errors import HostError, internal
from host.inference.request import Tensor, read_bytes
from host.instances.regions import RegionBlock
from stub.wire.arena import Block


def is_in_place(tensor: Tensor, placement: object) -> bool:
    """Whether a stub has made the tensor where the client wants it."""
    block = tensor.owner
    return (
        isinstance(block, Block)
        and isinstance(placement, Block)
        and (block.arena, block.offset) == (placement.arena, placement.offset)
        and block.size <= placement.size
    )


def write_outputs(placement: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
    """Writes outputs to where the client wants them; returns the error if that fails.

    Outputs that a stub has written there already are left alone.
    """
    for index, output in enumerate(outputs):
        slot = placement.get(output.name)
        if slot is None:
            continue
        assert isinstance(slot, RegionBlock)
        if not is_in_place(output, slot):
            size = len(output.data)
            if size > slot.size:
                return _too_small(output.name, slot.size, size)
            try:
                slot.write(read_bytes(output.data))
            except OSError as error:
                return internal(f"output '{output.name}' cannot be written: {error.strerror}")
        outputs[index] = Tensor(output.name, output.datatype, output.shape, b"")
    return None


def _too_small(output: str, room: int, size: int) -> HostError:
    """The error with its documented text.

    Source: docs/reference/protocol.md, "Shared memory".
    """
    return internal(
        f"shared memory size specified with the request for output '{output}' ({room} bytes)"
        f" should be at least {size} bytes to hold the results"
    )

"""Tensors in memory that clients have registered: read, or written, by the host itself."""

from __future__ import annotations

from collections.abc import Mapping

from host.errors import HostError, internal
from host.inference import Tensor
from host.instances.arenas import Arenas
from stub.wire.arena import Block


class ClientMemory:
    """The clients' memory among the arenas. The client may change it, or make it smaller."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas

    def private(self, tensor: Tensor) -> Tensor:
        """The tensor with bytes that no client can change. Raises HostError if they are gone."""
        block = tensor.owner
        region = self._arenas.region(block.arena) if isinstance(block, Block) else None
        if region is None or not isinstance(block, Block):
            return tensor
        data = region.read(block.offset, block.size)
        if len(data) < block.size:
            raise internal(f"the client's memory of tensor '{tensor.name}' has become too small")
        return Tensor(tensor.name, tensor.datatype, tensor.shape, data)

    def deliver(self, slots: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
        """See to it that outputs are where the client wants them; what stands against it.

        What lies there already, as a stub has written it there, is left alone.
        """
        for index, output in enumerate(outputs):
            slot = slots.get(output.name)
            if slot is None:
                continue
            assert isinstance(slot, Block)
            owner = output.owner
            written = isinstance(owner, Block) and (
                owner.arena == slot.arena and owner.offset == slot.offset
            )
            if not written:
                size = len(output.data)
                if size > slot.size:
                    return _too_small(output.name, slot.size, size)
                region = self._arenas.region(slot.arena)
                if region is None:
                    return internal(f"the region of output '{output.name}' is gone")
                try:
                    region.write(slot.offset, output.data)
                except OSError as error:
                    return internal(f"output '{output.name}' cannot be written: {error.strerror}")
            outputs[index] = Tensor(output.name, output.datatype, output.shape, b"")
        return None


def _too_small(output: str, room: int, size: int) -> HostError:
    """The documented text (protocol spec 4)."""
    return internal(
        f"shared memory size specified with the request for output '{output}' ({room} bytes)"
        f" should be at least {size} bytes to hold the results"
    )

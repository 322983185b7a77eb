"""Outputs that a framework writes directly into the stub's shared memory, and parts of them."""

from functools import partial
from typing import Any, Optional, Sequence

import numpy as np

from pb_utils import _runtime
from pb_utils._storage import address_of, array_at
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

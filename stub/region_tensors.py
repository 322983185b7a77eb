"""Tensors in a client's shared memory that a batch passes on by reference.

An output, or a response of another model, may refer to an input of the batch in its client's region
instead of a copy. The client may change that memory once it has its response, so a tensor that the
model keeps until then gets its own bytes.
"""

import threading
import weakref
from typing import Callable, Tuple

import pb_utils
from stub.wire.arena import Block


class RegionBlock(Block):
    """A block in a client's shared memory, received with the batch number `batch`.

    The client may change the memory after that batch, even while the block is alive. `file` and
    `file_offset` tell where it lies, as in `CopyOnWriteMapping`. `passed_on`: a tensor of
    `RegionTensors` refers to it.
    """

    __slots__ = ("batch", "file", "file_offset", "passed_on")

    batch: int  # set after construction, like the next ones
    file: Tuple[int, int]
    file_offset: int
    passed_on: bool


class RegionTensors:
    """The tensors of one stub that refer to a client's memory until their batch ends."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakSet[pb_utils.Tensor] = weakref.WeakSet()
        self._lock = threading.RLock()  # reentrant, as finalisers of the model may call

    def add(self, tensor: pb_utils.Tensor, block: RegionBlock) -> None:
        """Adds a tensor whose bytes are those of the block."""
        block.passed_on = True
        with self._lock:
            self._tensors.add(tensor)

    def copy_all(self) -> None:
        """Gives all tensors that are alive their own bytes."""
        if self._tensors:
            self._copy(lambda block: True)

    def copy_range(self, file: Tuple[int, int], offset: int, size: int) -> None:
        """Gives the tensors their own bytes that refer to bytes of a file which will change."""
        if self._tensors:
            self._copy(
                lambda block: (
                    block.file == file
                    and block.file_offset < offset + size
                    and offset < block.file_offset + block.size
                )
            )

    def _copy(self, changes: Callable[[RegionBlock], bool]) -> None:
        with self._lock:
            for tensor in list(self._tensors):
                block = tensor._region_owner()
                if not isinstance(block, RegionBlock):  # it has its own bytes by now
                    self._tensors.discard(tensor)
                elif changes(block):
                    tensor._copy_from_owner()
                    self._tensors.discard(tensor)

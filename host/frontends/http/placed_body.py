"""The body of an inference request whose large tensors are written to shared memory as they arrive.

The rules of the body are in docs/reference/http.md, "Inference request".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from host.frontends.receive_memory import MIN_PLACED_BYTES, Placer, ReserveBlock
from stub.wire.arena import Block

ReadSizes = Callable[[bytes], Sequence[int]]
"""Returns the sizes of the binary tensors that follow a JSON part; as many as it can read."""


class PlacedBody(bytes):
    """The bytes of a body without the tensors that are in blocks.

    `blocks`: one for each binary tensor, None for those that are in these bytes.
    """

    blocks: list[Block | None]


class BodyPlacer(Placer):
    """Takes the bytes of a body of `size` bytes that begins with a JSON part, as they arrive."""

    def __init__(
        self, size: int, header_length: int, read_sizes: ReadSizes, reserve: ReserveBlock
    ) -> None:
        """Raises MemoryError."""
        super().__init__(size, reserve)
        self._header_length = header_length
        self._read_sizes = read_sizes
        self._sizes: Iterator[int] | None = None  # once the JSON part has arrived
        self._blocks: list[Block | None] = []
        self._keep(header_length)

    def _begin_part(self) -> None:
        if self._sizes is None:
            self._sizes = iter(self._read_sizes(bytes(self._rest.memory[: self._header_length])))
        size = next(self._sizes, None)
        if size is None:  # more than the JSON part tells of: that is an error later
            self._keep(self._left)
        elif MIN_PLACED_BYTES < size <= self._left:
            self._blocks.append(self._place(size))
        else:
            self._keep(min(size, self._left))
            self._blocks.append(None)

    def finish(self) -> bytes:
        """The body: without its blocks, if some tensors were placed."""
        if not any(self._blocks):
            return self._rest.finish()
        body = PlacedBody(self._rest.memory[: self._rest.size])
        body.blocks = self._blocks
        return body

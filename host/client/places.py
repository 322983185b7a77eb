"""Where the large tensors of a request lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from host.client.messages import RequestOptions, add_input
from host.client.shared_memory import Region, aligned
from host.client.signature import LARGE, EncodedTensor, Signature
from host.inference.request import Result

_REGION, _REGION_SIZE, _REGION_OFFSET = (
    "shared_memory_region",
    "shared_memory_byte_size",
    "shared_memory_offset",
)
_MAX_SIZES = 1024


class OutputSizes:
    """Sizes of large outputs of variable shape, by the shapes of the inputs.

    The place of an output has to be known before. If an output does not fit, its request is sent
    again, so an output whose size has once differed for the same shapes goes in the message.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, str, tuple[tuple[int, ...], ...]], int] = {}
        self._varying: set[tuple[str, str]] = set()

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self._sizes)

    def expect(self, model: str, name: str, inputs: Sequence[EncodedTensor]) -> int:
        """The size of an output, 0 if it is not known."""
        if not self._sizes or (model, name) in self._varying:
            return 0
        return self._sizes.get((model, name, _shapes(inputs)), 0)

    def observe(self, model: str, inputs: Sequence[EncodedTensor], result: Result) -> None:
        """Remembers the sizes of the outputs of a response."""
        for name, array in result.outputs.items():
            size = 0 if array.dtype.hasobject else array.nbytes
            if size < LARGE and not self._sizes:
                continue
            key = model, name, _shapes(inputs)
            known = self._sizes.get(key)
            if known is not None and known != size:
                self._varying.add((model, name))
            elif known is None and size >= LARGE and len(self._sizes) < _MAX_SIZES:
                self._sizes[key] = size


def _shapes(inputs: Sequence[EncodedTensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.shape for tensor in inputs)


class Places:
    """Where the large tensors of a request lie in a region.

    `size`: of the region, 0 for none. `outputs`: offsets and sizes by name.
    """

    def __init__(self, inputs: Sequence[EncodedTensor]) -> None:
        self.size = 0
        self._tensors = inputs
        self._inputs: dict[str, int] = {}
        self._wanted: list[str] = []
        self.outputs: dict[str, tuple[int, int]] = {}
        for tensor in inputs:
            size = tensor.byte_size
            if size >= LARGE:
                self._inputs[tensor.name] = self._reserve(size)

    def expect_outputs(
        self, signature: Signature, options: RequestOptions, output_sizes: OutputSizes
    ) -> None:
        """Reserves places for the large outputs whose sizes are known."""
        wanted = options.outputs or options.classes or signature.outputs
        self._wanted = [name for name in signature.outputs if name in wanted]
        for name in self._wanted:
            size = signature.output_byte_size(name, self._tensors)
            if not size and options.retried:
                size = output_sizes.expect(options.model, name, self._tensors)
            if size >= LARGE and name not in options.classes:
                self.outputs[name] = self._reserve(size), size

    def _reserve(self, size: int) -> int:
        offset, self.size = self.size, self.size + aligned(size)
        return offset

    def fill(self, message: Any, region: Region) -> None:
        """Adds the inputs to a message, and the outputs that lie in the region."""
        for tensor in self._tensors:
            offset = self._inputs.get(tensor.name)
            if offset is None:
                add_input(message, tensor)
                continue
            region.write(offset, tensor)
            entry = message.inputs.add(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
            )
            _set_place(entry, region, offset, tensor.byte_size)
        if not self.outputs:
            return
        known = {entry.name: entry for entry in message.outputs}
        for name in self._wanted:
            entry = known.get(name) or message.outputs.add(name=name)
            if name in self.outputs:
                _set_place(entry, region, *self.outputs[name])


def _set_place(entry: Any, region: Region, offset: int, size: int) -> None:
    entry.parameters[_REGION].string_param = region.name
    entry.parameters[_REGION_SIZE].int64_param = size
    if offset:
        entry.parameters[_REGION_OFFSET].int64_param = offset

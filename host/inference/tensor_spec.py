"""One input or output of a model: what a tensor must be, and its reshape."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import repeat
from math import prod
from typing import Any, NoReturn

import numpy as np

from host.errors import invalid_argument
from host.inference.request import (
    CHUNK_SIZE,
    Buffer,
    InferRequest,
    SharedMemoryBytes,
    Tensor,
    copy_from_shared_memory,
    refuse_if_too_large,
)
from pb_utils._datatypes import CODES, NAMES, SIZES

_LENGTH = struct.Struct("<I")
_NUMPY_THRESHOLD = 64  # elements; a loop is faster than numpy for fewer
_SHORT = 256  # bytes; shorter elements are found all at once


class InvalidBytesTensor(Exception):
    """The elements do not fill the buffer; `text` adds the tensor and the model."""

    def text(self, tensor: str, model: str) -> str:
        """The message for the client.

        Source: docs/reference/protocol.md, "The request against the model", rule 12.
        """
        template: str = self.args[0]
        return template.format(f"inference input '{tensor}' for model '{model}'", tensor=tensor)


def check_elements(data: Buffer | SharedMemoryBytes, count: int) -> None:
    """Checks that `data` (contiguous) holds `count` elements, each a length and as many bytes.

    Reads nothing outside of the buffer. The time depends on its size, not on `count`; at most one
    chunk is copied. Raises InvalidBytesTensor, and HostError INTERNAL if shared memory of the
    client is gone.
    """
    if isinstance(data, SharedMemoryBytes):
        check_elements_in_chunks(data.read_part, len(data), count, CHUNK_SIZE)
        return
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if count >= _NUMPY_THRESHOLD and count * 4 <= size:
        if _is_uniform(data, size, count) or _are_short(data, size, count):
            return
    if not _lengths_chain(data, size, count):
        whole = data
        # Raises the precise error.
        check_elements_in_chunks(lambda begin, length: whole, size, count, size)


def _is_uniform(data: Buffer, size: int, count: int) -> bool:
    """Whether all elements have the same length, found without a loop."""
    stride, rest = divmod(size, count)
    if rest or _LENGTH.unpack_from(data)[0] != stride - 4:
        return False
    lengths = np.ndarray((count,), "<u4", data, 0, (stride,))
    return bool((lengths == stride - 4).all())


def _are_short(data: Buffer, size: int, count: int) -> bool:
    """Whether the elements are short texts. True is certain, False is not.

    A length may stand wherever four bytes are a number below 256, and three zero bytes are rare in
    text. If each such place is the end of the element before, these are the elements.
    """
    if size > count * (_SHORT + 4):
        return False
    words = np.ndarray((size - 3,), "<u4", data, 0, (1,))
    places = np.flatnonzero(words < _SHORT)
    if len(places) != count or places[0] != 0:
        return False
    ends = places + 4 + words[places]
    return bool(ends[-1] == size and (ends[:-1] == places[1:]).all())


def _lengths_chain(data: Buffer, size: int, count: int) -> bool:
    """Whether following `count` lengths leads exactly to the end of the buffer."""
    unpack = _LENGTH.unpack_from
    position = 0
    try:
        for _ in repeat(None, count):
            position += unpack(data, position)[0] + 4
    except struct.error:  # a length lies outside of the buffer
        return False
    return position == size


def check_elements_in_chunks(
    part: Callable[[int, int], Buffer], size: int, count: int, most: int
) -> None:
    """Checks `size` bytes in chunks: `part(begin, length)` returns up to `most` bytes, at least 4.

    Raises InvalidBytesTensor.
    """
    position = found = 0
    while size - position >= 4:
        end = min(most, size - position)
        piece = part(position, end)
        place = 0
        many = _uniform_run(piece, end)
        if many >= _NUMPY_THRESHOLD and found + many <= count:
            place = many * (_LENGTH.unpack_from(piece)[0] + 4)
            found += many
        while end - place >= 4:
            if found == count:
                raise InvalidBytesTensor(
                    f"unexpected number of string elements {found + 1} for {{}}, expecting {count}"
                )
            (length,) = _LENGTH.unpack_from(piece, place)
            place += 4
            left = size - position - place
            if length > left:
                if found + 1 < count:
                    raise InvalidBytesTensor(
                        f"expected {count} string elements for {{}}, got {found + 1}"
                    )
                raise InvalidBytesTensor(
                    "incomplete string data for inference input '{tensor}', expecting string of"
                    f" length {length} but only {left} bytes available"
                )
            place += length
            found += 1
        position += place
    if position < size:
        raise InvalidBytesTensor(
            "incomplete string length indicator for {}, expecting 4 bytes but only"
            f" {size - position} bytes available."
            " Please make sure the string length indicator is in one buffer."
        )
    if found != count:
        raise InvalidBytesTensor(f"expected {count} string elements for {{}}, got {found}")


def _uniform_run(piece: Buffer, size: int) -> int:
    """The number of elements of equal length in a chunk, if it holds nothing else; otherwise 0."""
    length = _LENGTH.unpack_from(piece)[0]
    many: int = size // (length + 4)
    lengths = np.ndarray((many,), "<u4", piece, 0, (length + 4,))
    return many if (lengths == length).all() else 0


MAX_SIZE = 2**63 - 1
"""Maximum size of a tensor in bytes, or in elements for BYTES.

Source: docs/reference/protocol.md, "The request against the model", rule 12.
"""

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
    " prepended to each input shape. If you want to specify the full shape including the batch dim"
    " in your input dims config, try setting max_batch_size to zero. See the model configuration"
    " docs for more info on max_batch_size."
)


class TensorSpec:
    """The two shapes of one tensor: `dims` for clients, `shape` for the model.

    A shape tensor has no batch dimension but one more value, in front: the batch size
    (docs/reference/configuration-and-scheduling.md, "Shape tensors, non-linear formats, format").
    """

    __slots__ = ("dims", "shape", "reshapes", "_lead")

    def __init__(self, entry: Any, max_batch_size: int) -> None:
        self.dims: list[int] = list(entry.dims)
        if entry.is_shape_tensor and max_batch_size:
            max_batch_size = 0
            self.dims[0] += self.dims[0] != -1
        self.reshapes: bool = entry.HasField("reshape")
        self.shape: list[int] = list(entry.reshape.shape) if self.reshapes else self.dims
        self._lead = 1 if max_batch_size else 0

    def to_model_shape(self, tensor: Tensor) -> Tensor:
        """The tensor in the model's shape."""
        return self._convert(tensor, self.dims, self.shape)

    def to_client_shape(self, tensor: Tensor) -> Tensor:
        """The tensor in the client's shape; unchanged if it does not have the model's shape."""
        tail = tensor.shape[self._lead :]
        fits = len(tail) == len(self.shape) and all(
            want in (-1, got) for want, got in zip(self.shape, tail, strict=True)
        )
        return self._convert(tensor, self.shape, self.dims) if fits else tensor

    def _convert(self, tensor: Tensor, source: list[int], target: list[int]) -> Tensor:
        lead = self._lead
        pairs = zip(source, tensor.shape[lead:], strict=True)
        variable = iter([got for want, got in pairs if want == -1])
        shape = tensor.shape[:lead] + [next(variable) if d == -1 else d for d in target]
        # A new tensor, as the old one may be in use elsewhere too.
        return Tensor(tensor.name, tensor.datatype, shape, tensor.data, tensor.owner)


class InputSpec(TensorSpec):
    """One input of the configuration."""

    __slots__ = (
        "name",
        "optional",
        "content_counts",
        "_model",
        "_datatype",
        "_size",
        "_expected",
        "_any_size",
        "_fixed_bytes",
    )

    def __init__(self, entry: Any, model: str, max_batch_size: int) -> None:
        super().__init__(entry, max_batch_size)
        max_batch_size *= self._lead
        self.name: str = entry.name
        self.optional: bool = entry.optional
        self._model = model
        self._datatype = wire_name(entry.data_type)
        self._size = SIZES.get(self._datatype, 0)  # 0 for BYTES
        # Whether tensors of equal shape and size may still need different treatment.
        self.content_counts: bool = not self._size or entry.is_shape_tensor
        self._expected = [-1] * self._lead + self.dims
        self._any_size: bool = entry.is_non_linear_format_io
        size = prod(self.dims) * self._size
        # Bytes of one batch element where that is constant and below the maximum.
        fixed = self.dims and min(self.dims) > 0 and size * max(1, max_batch_size) <= MAX_SIZE
        self._fixed_bytes: int = size if fixed else 0

    def copy_from_shared_memory(self, tensor: Tensor, request: InferRequest) -> Tensor:
        """Copies the tensor out of shared memory, where its client could change it after the check.

        Raises HostError.
        """
        data = tensor.data
        if isinstance(data, SharedMemoryBytes) and len(data) > CHUNK_SIZE:
            refuse_if_too_large(tensor.name, data)
            self.validate_tensor(tensor, request)  # before memory is taken for the copy
        return copy_from_shared_memory(tensor)

    def validate_tensor(self, tensor: Tensor, request: InferRequest) -> bool:
        """Validates the tensor; returns whether it has to be reshaped. Raises HostError."""
        if tensor.datatype != self._datatype:
            given = tensor.datatype if tensor.datatype in CODES else "<invalid>"
            raise_invalid_input(
                request,
                f"inference input '{self.name}' data-type is '{given}',"
                f" but model '{self._model}' expects '{self._datatype}'",
            )
        shape = tensor.shape
        data = tensor.data
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if self._fixed_bytes:
            if (shape[1:] if self._lead else shape) != self.dims:
                self._check_shape(shape, request)
            expected = self._fixed_bytes * shape[0] if self._lead else self._fixed_bytes
            if size != expected and not self._any_size:
                self._refuse_size(request, expected, size)
        else:
            elements = 0
            if len(shape) == len(self._expected):
                elements = 1
                for want, got in zip(self._expected, shape):  # noqa: B905 - of equal length
                    if got <= 0 or (want != got and want != -1):
                        elements = 0
                        break
                    elements *= got
            # Otherwise it is usual: all of its rules hold.
            if not elements or not self._size or elements * self._size != size:
                self._check_shape(shape, request)
                self._check_size(tensor, size, request)
        return self.reshapes

    def _check_shape(self, shape: list[int], request: InferRequest) -> None:
        dims = self.dims
        lead = self._lead
        if len(shape) == len(dims) + lead:
            for index, want in enumerate(dims, lead):
                got = shape[index]
                if got == -1:
                    raise_invalid_input(
                        request,
                        f"All input dimensions should be specified for input '{self.name}'"
                        f" for model '{self._model}', got {_shape(shape)}",
                    )
                if want not in (-1, got):
                    break
            else:
                return
        full = [-1, *dims] if lead else dims
        raise_invalid_input(
            request,
            f"unexpected shape for input '{self.name}' for model '{self._model}'."
            f" Expected {_shape(full)}, got {_shape(shape)}. {_BATCH_NOTE if lead else ''}",
        )

    def _check_size(self, tensor: Tensor, size: int, request: InferRequest) -> None:
        shape = tensor.shape
        strings = not self._size
        if shape and min(shape) < 0:
            where = " in shape" if strings else ""
            raise invalid_argument(
                f"tensor '{self.name}' contains an invalid dimension{where} {_shape(shape)}"
            )
        elements = prod(shape) if shape else 0
        # A dimension of 0 must not hide others that no array library would accept.
        extent = elements or prod(dim for dim in shape if dim)
        if extent * (self._size or 1) > MAX_SIZE:
            what = "element count" if strings else "byte size"
            raise invalid_argument(
                f"{what} for tensor '{self.name}' exceeds maximum size of {MAX_SIZE}"
            )
        if self._any_size:
            return
        if strings:
            try:
                check_elements(tensor.data, elements)
            except InvalidBytesTensor as fault:
                raise_invalid_input(request, fault.text(self.name, self._model))
        elif size != elements * self._size:
            self._refuse_size(request, elements * self._size, size)

    def _refuse_size(self, request: InferRequest, expected: int, size: int) -> NoReturn:
        raise_invalid_input(
            request,
            f"input byte size mismatch for input '{self.name}' for model '{self._model}'."
            f" Expected {expected}, got {size}",
        )


def wire_name(data_type: int) -> str:
    """The protocol's name of a configuration's data type: `BYTES` for TYPE_STRING."""
    return NAMES.get(data_type, "<invalid>")


def byte_size(datatype: str) -> int:
    """Bytes of an element; for BYTES, of an empty one.

    Source: docs/reference/configuration-and-scheduling.md, "Data types".
    """
    return SIZES.get(datatype, 4)


def raise_invalid_input(request: InferRequest, text: str) -> NoReturn:
    """Raises HostError INVALID_ARG with a text that names the request."""
    raise invalid_argument(f"[request id: {request.id or '<id_unknown>'}] {text}")


def _shape(dims: list[int]) -> str:
    return f"[{','.join(map(str, dims))}]"

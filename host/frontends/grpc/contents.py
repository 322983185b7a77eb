"""Converts typed `InferTensorContents` to tensor bytes; large ones in a thread, in parts.

Protobuf turns each element into a Python object: 16 million elements take a second, in which no
other thread may run. Parts of 16 KiB take about a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError, invalid_argument
from host.frontends.grpc.protobuf_wire import encode_varint, read_varint
from host.inference.request import Buffer, serialize_bytes

# Field, datatype in error texts, type of its values on the wire, and the format of each datatype
# that it may carry. FP16 and BF16 have no field, as they travel raw only.
_FIELDS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("bool_contents", "BOOL", "?", {"BOOL": "?"}),
    ("int_contents", "INT32", "<i4", {"INT8": "<i1", "INT16": "<i2", "INT32": "<i4"}),
    ("int64_contents", "INT64", "<i8", {"INT64": "<i8"}),
    ("uint_contents", "UINT32", "<u4", {"UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4"}),
    ("uint64_contents", "UINT64", "<u8", {"UINT64": "<u8"}),
    ("fp32_contents", "FP32", "<f4", {"FP32": "<f4"}),
    ("fp64_contents", "FP64", "<f8", {"FP64": "<f8"}),
)
_DATATYPES = {name for *_, stored in _FIELDS for name in stored} | {"FP16", "BF16", "BYTES"}


class ContentsConverter:
    """Converts the typed contents of one input, whole or in parts of the same field.

    Values are little-endian; narrow integers keep their low bytes; BYTES elements get length
    prefixes; no values are an empty tensor (docs/reference/grpc.md, "Input data").
    """

    def __init__(self, name: str, datatype: str, model: str) -> None:
        self._name = name
        self._datatype = datatype
        self._model = model
        self._field = ""

    def convert(self, contents: Any) -> bytes:
        """The bytes of an `InferTensorContents`. Raises HostError INVALID_ARG."""
        data = b""
        for field, field_type, wire, stored in _FIELDS:
            values = getattr(contents, field)
            if values:
                self._check_field(field, field_type, self._datatype in stored)
                array = np.fromiter(values, wire, len(values))
                data = array.astype(stored[self._datatype]).tobytes()
        if contents.bytes_contents:
            self._check_field("bytes_contents", "BYTES", self._datatype == "BYTES")
            data = serialize_bytes(contents.bytes_contents)
        return data

    def _check_field(self, field: str, field_type: str, fits: bool) -> None:
        prefix = (
            f"unexpected explicit tensor data for input tensor '{self._name}' for model "
            f"'{self._model}'"
        )
        if self._field not in ("", field):
            raise invalid_argument(f"{prefix}, binary data was already supplied.")
        if not fits:
            expected = self._datatype if self._datatype in _DATATYPES else "<invalid>"
            raise invalid_argument(
                f"{prefix} of type '{field_type}', expected datatype '{expected}'"
            )
        self._field = field


MIN_LARGE_INPUT_BYTES = 1 << 16
"""An InferInputTensor of this size or more may have large contents."""

_PART_BYTES = 1 << 14
_PAUSE = 0.0001  # seconds; without it, a waiting thread gets its turn only after 5 ms
_TENSOR_FIELDS = pb.ModelInferRequest.InferInputTensor.DESCRIPTOR.fields_by_name
_CONTENTS_FIELDS = pb.InferTensorContents.DESCRIPTOR.fields_by_name
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}  # by wire type
_CONTENTS_TAG = _TENSOR_FIELDS["contents"].number << 3 | _LENGTH_DELIMITED
# Bytes of an element in a packed field, by the field's tag; 0: varints.
_PACKED = {
    _CONTENTS_FIELDS[name].number << 3 | _LENGTH_DELIMITED: int(kind[2:]) if "f" in kind else 0
    for name, _, kind, _ in _FIELDS
}


class LargeInput:
    """An input with large typed contents. It takes the place of its InferInputTensor."""

    __slots__ = ("name", "datatype", "shape", "parameters", "_contents", "_result")

    def __init__(self, message: Any, contents: Buffer) -> None:
        self.name: str = message.name
        self.datatype: str = message.datatype
        self.shape: tuple[int, ...] = tuple(message.shape)
        self.parameters = message.parameters
        self._contents = contents
        self._result: bytearray | HostError = bytearray()

    @classmethod
    def parse(cls, data: memoryview) -> LargeInput | None:
        """Parses an InferInputTensor without its contents; None if it has none.

        Raises IndexError or DecodeError if the message is invalid.
        """
        rest, contents = [], []
        position = 0
        while position < len(data):
            tag, start, end = _skip_field(data, position)
            if tag == _CONTENTS_TAG:
                contents.append(data[start:end])
            else:
                rest.append(data[position:end])
            position = end
        if not contents:
            return None
        message = pb.ModelInferRequest.InferInputTensor.FromString(b"".join(rest))
        return cls(message, contents[0] if len(contents) == 1 else b"".join(contents))

    def decode(self, model: str, cancelled: Callable[[], bool]) -> None:
        """Converts the contents, unless cancelled. Takes a second for 16 million elements."""
        converter = ContentsConverter(self.name, self.datatype, model)
        converted = bytearray()
        try:
            for part in split_contents(self._contents):
                if cancelled():
                    break
                time.sleep(_PAUSE)
                converted += converter.convert(pb.InferTensorContents.FromString(part))
            self._result = converted
        except HostError as error:
            self._result = error
        except (IndexError, DecodeError):
            self._result = invalid_argument(
                "failed to parse the ModelInferRequest message: invalid contents of input "
                f"'{self.name}'"
            )
        self._contents = b""

    def data(self) -> memoryview:
        """The bytes of the tensor, once `decode` has returned. Raises HostError INVALID_ARG."""
        if isinstance(self._result, HostError):
            raise self._result
        return memoryview(self._result)


async def decode_inputs(inputs: list[LargeInput], model: str) -> None:
    """Decodes inputs, in a thread. Once cancelled, the thread ends at its next part."""
    cancelled = False

    def decode() -> None:
        for large in inputs:
            large.decode(model, lambda: cancelled)

    try:
        await asyncio.to_thread(decode)
    finally:
        cancelled = True


def split_contents(contents: Buffer) -> Iterator[bytes]:
    """Splits an InferTensorContents into messages of about 16 KiB with the same elements.

    An element of BYTES stays whole. Raises IndexError if a field runs past the end.
    """
    waiting = position = 0  # the fields from `waiting` on belong to the next message
    while position < len(contents):
        tag, start, end = _skip_field(contents, position)
        if tag in _PACKED and end - start > _PART_BYTES:
            if waiting < position:
                yield bytes(contents[waiting:position])
            yield from _split_packed(tag, contents, start, end)
            waiting = end
        elif end - waiting > _PART_BYTES:
            yield bytes(contents[waiting:end])
            waiting = end
        position = end
    if waiting < position:
        yield bytes(contents[waiting:position])


def _split_packed(tag: int, contents: Buffer, position: int, end: int) -> Iterator[bytes]:
    while position < end:
        part_end = min(position + _PART_BYTES, end)  # a whole number of elements of fixed size
        if not _PACKED[tag]:
            while part_end < end and contents[part_end - 1] > 127:
                part_end += 1
        payload = contents[position:part_end]
        yield b"".join((bytes((tag,)), encode_varint(len(payload)), payload))
        position = part_end


def _skip_field(data: Buffer, position: int) -> tuple[int, int, int]:
    """The tag of the field at `position`, the start of its value, and its end.

    Raises IndexError if the field runs past the end, or is a group.
    """
    tag, position = read_varint(data, position)
    wire_type = tag & 7
    if wire_type == _LENGTH_DELIMITED:
        length, position = read_varint(data, position)
        end = position + length
    elif wire_type == _VARINT:
        end = read_varint(data, position)[1]
    elif wire_type in _FIXED_BYTES:
        end = position + _FIXED_BYTES[wire_type]
    else:
        raise IndexError(position)
    if end > len(data):
        raise IndexError(end)
    return tag, position, end

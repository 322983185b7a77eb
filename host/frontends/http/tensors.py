"""Converts tensors from and to JSON arrays, in steps, and responses to the parts of a body."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from host.errors import HostError, internal, invalid_argument
from host.frontends.http import json_text as json
from host.frontends.http.json_arrays import LargeArray
from host.frontends.http.json_text import (
    dump_numbers,
    dump_strings,
    is_signed,
    is_unsigned,
    with_context,
    wrong_type,
)
from host.inference.request import Buffer, InferResponse, Tensor, read_bytes, serialize_bytes
from pb_utils._datatypes import CODES

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""Yields after each step but the last, and returns the result."""


async def run_in_turns(steps: Steps[_Result]) -> _Result:
    """Returns the result of all steps; each one has a turn of the event loop."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _Result = done.value
            return result
        await asyncio.sleep(0)


MAX_BYTES = 2**63 - 1
MAX_NESTING = 100
"""The maximum nesting depth of the JSON arrays of a tensor."""

PIECE_ELEMENTS = 8192
"""Elements of a tensor that are written in one step."""

_SIGNED = {"INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64}
_UNSIGNED = {"UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64}
_FLOATS = {"FP32": np.float32, "FP64": np.float64}
_NUMPY_DTYPES: dict[str, Any] = {"BOOL": np.bool_, **_SIGNED, **_UNSIGNED, **_FLOATS}
_BINARY_ONLY = ("FP16", "BF16")


def _check_size(name: str, size: int, most: int) -> None:
    """Raises HostError INVALID_ARG if an input in JSON form has more than `most` bytes."""
    if size > most:
        raise invalid_argument(
            f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum"
            f" allowed value of {most} bytes. Use --http-max-input-size to increase"
            " the limit."
        )


def read_tensor(
    name: str,
    datatype: str,
    shape: Sequence[int],
    data: Any,
    max_size: int,
    flat_numbers: bool = False,
) -> bytes:
    """Returns the bytes of an input whose `data` is a JSON array, with any nesting.

    `data` is a list or a LargeArray; of too long a LargeArray, only the beginning is decoded.
    `max_size`: bytes that an input may have in JSON form (`--http-max-input-size`).
    `flat_numbers`: it is a list of `int` and `float` without any nesting.
    `shape` gives the number of elements. Elements of BYTES are counted later, by the core.
    Raises HostError with the texts of docs/reference/http.md, "Inference request".
    """
    count = _element_count(name, shape)
    if datatype not in CODES:
        raise invalid_argument(f"invalid datatype for input {name}")
    if type(data) is not list and not isinstance(data, LargeArray):
        raise with_context("Unable to parse 'data'", wrong_type("array"))
    refusal = binary_only_error(name, datatype)
    if refusal is not None and count > 0:
        raise refusal
    if count == 0:
        return b""
    if datatype == "BYTES":
        return read_strings(name, data, max_size)
    size = np.dtype(_NUMPY_DTYPES[datatype]).itemsize
    if count * size > MAX_BYTES:
        raise invalid_argument(
            f"byte size overflow for input '{name}': element count ({count}) * data type size"
            f" ({size}) exceeds maximum allowed size ({MAX_BYTES})"
        )
    _check_size(name, count * size, max_size)
    if flat_numbers and datatype == "FP32" and isinstance(data, list) and len(data) == count:
        try:
            return struct.pack(f"<{count}f", *data)
        except (OverflowError, struct.error):
            pass  # too big for FP32, or even for a double: handled below
    found = 0
    parts: list[bytes] = []
    for piece in data if isinstance(data, LargeArray) else (data,):
        try:
            values, kinds = _flatten(piece)
            left = count - found
            if len(values) > left:
                parts.append(read_numbers(datatype, values[:left]))
            else:
                parts.append(_read_numbers(datatype, values, kinds))
        except HostError as error:
            raise with_context("Unable to parse 'data'", error) from None
        found += len(values)
        if found > count:
            break
    if found < count:
        raise internal("Failed to parse 'data' field: shape does not match true shape")
    if found > count:
        raise internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def binary_only_error(name: str, datatype: str) -> HostError | None:
    """Returns the error for an input of a datatype without a JSON form; None if it has one."""
    if datatype not in _BINARY_ONLY:
        return None
    return invalid_argument(
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format"
        f" for input {name}"
    )


def _element_count(name: str, shape: Sequence[int]) -> int:
    """Returns the number of elements. Raises HostError INVALID_ARG for an invalid shape."""
    if any(dim < 0 for dim in shape):
        raise invalid_argument(
            f"invalid shape for input '{name}': shape {_format_shape(shape)} contains one or more"
            " invalid dimensions"
        )
    # No dimensions: no elements (docs/reference/protocol.md, "The request against the model").
    count = math.prod(shape) if shape else 0
    if count > MAX_BYTES:
        raise invalid_argument(
            f"invalid shape for input '{name}': shape {_format_shape(shape)} causes total element"
            f" count to exceed maximum size of {MAX_BYTES}"
        )
    return count


def _format_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def flatten(data: list[Any]) -> list[Any]:
    """Returns the scalars of nested arrays in order. Raises HostError INVALID_ARG if too deep."""
    return _flatten(data)[0]


def _flatten(data: list[Any]) -> tuple[list[Any], set[type]]:
    """Does as `flatten`; returns the types of the scalars as well."""
    levels = 1
    while True:
        kinds = set(map(type, data))
        if list not in kinds:
            return data, kinds
        levels += 1
        if levels > MAX_NESTING:
            raise invalid_argument(
                f"JSON nesting depth exceeds maximum allowed limit ({MAX_NESTING})"
            )
        if len(kinds) > 1:
            flat = _flatten_mixed(data, levels - 1)
            return flat, set(map(type, flat))
        data = list(chain.from_iterable(data))


def _flatten_mixed(data: list[Any], levels: int) -> list[Any]:
    """Flattens arrays that contain both scalars and arrays; this is slower."""
    flat: list[Any] = []
    stack = [iter(data)]
    while stack:
        for value in stack[-1]:
            if type(value) is list:
                if levels + len(stack) > MAX_NESTING:
                    raise invalid_argument(
                        f"JSON nesting depth exceeds maximum allowed limit ({MAX_NESTING})"
                    )
                stack.append(iter(value))
                break
            flat.append(value)
        else:
            stack.pop()
    return flat


def read_numbers(datatype: str, values: list[Any]) -> bytes:
    """Encodes scalars of any datatype except BYTES, FP16 and BF16.

    Integers keep their low bytes. Raises HostError INTERNAL for an element of another type.
    """
    return _read_numbers(datatype, values, set(map(type, values)))


def _read_numbers(datatype: str, values: list[Any], kinds: set[type]) -> bytes:
    """Does as `read_numbers`; `kinds` are the types of the values."""
    if datatype == "BOOL":
        if kinds - {bool}:
            raise wrong_type("boolean")
        return np.array(values, np.bool_).tobytes()
    if datatype in _FLOATS:
        if kinds - {int, float}:
            raise internal("attempt to access JSON non-number as double")
        try:  # five times as fast as an array of a list
            doubles = struct.pack(f"<{len(values)}d", *values)
        except struct.error:  # `kinds` leaves only one reason
            raise internal(
                "failed to parse the request JSON buffer: Number too big to be stored in double."
            ) from None
        if datatype == "FP64":
            return doubles
        with np.errstate(over="ignore"):
            return np.frombuffer(doubles).astype(np.float32).tobytes()
    if datatype in _SIGNED:
        if kinds - {int} or (values and not (is_signed(min(values)) and is_signed(max(values)))):
            raise wrong_type("signed-integer")
        return np.array(values, np.int64).astype(_SIGNED[datatype]).tobytes()
    if kinds - {int} or (values and not (is_unsigned(min(values)) and is_unsigned(max(values)))):
        raise wrong_type("unsigned-integer")
    return np.array(values, np.uint64).astype(_UNSIGNED[datatype]).tobytes()


def read_strings(name: str, data: list[Any] | LargeArray, max_size: int) -> bytes:
    """Encodes strings as a BYTES tensor. Raises HostError if not strings, or if too large."""
    size = 0
    parts: list[bytes] = []
    for piece in data if isinstance(data, LargeArray) else (data,):
        values = flatten(piece)
        if set(map(type, values)) - {str}:
            raise with_context("Unable to parse JSON bytes array", wrong_type("string"))
        try:
            elements = [value.encode("utf-8", "surrogateescape") for value in values]
        except UnicodeEncodeError:
            raise internal(
                "Unable to parse JSON bytes array: The surrogate pair in string is invalid."
            ) from None
        size += sum(map(len, elements)) + 4 * len(elements)
        if size <= max_size:
            parts.append(serialize_bytes(elements))
    _check_size(name, size, max_size)
    return b"".join(parts)


def write_tensor(tensor: Tensor) -> Steps[bytes]:
    """Writes a tensor as a flat JSON array. Raises HostError (docs/reference/http.md,
    "Inference response").
    """
    datatype, data = tensor.datatype, tensor.data
    if type(data) is not bytes:
        data = read_bytes(data)
    prefix = ""
    pieces: Iterable[Any]
    values: Any
    if datatype in _BINARY_ONLY:
        raise invalid_argument(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format"
            " for output"
        )
    if datatype == "BYTES":
        pieces = split_strings(data)
    elif datatype in _NUMPY_DTYPES:
        dtype = _NUMPY_DTYPES[datatype]
        whole = len(data) - len(data) % np.dtype(dtype).itemsize  # no incomplete last element
        array = np.frombuffer(data[:whole], dtype)
        pieces = (array,) if len(array) <= PIECE_ELEMENTS else _split_array(array)
        prefix = "Failed to write 'data' field: "
    else:
        raise invalid_argument("Invalid data type for output tensor")
    dump: Callable[[Any], bytes] = dump_strings if datatype == "BYTES" else dump_numbers
    count = 0
    written: list[bytes] = []
    for values in pieces:
        if written:
            yield
        count += len(values)
        if datatype == "FP32":
            values = values.astype(np.float64)  # as numbers of JSON are
        written.append(dump(values))
    if count != math.prod(tensor.shape):
        raise internal(
            f"{prefix}output tensor shape does not match size of output for '{tensor.name}'"
        )
    if len(written) == 1:
        return written[0]
    return b"[" + b",".join([part[1:-1] for part in written]) + b"]"


def _split_array(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(array), PIECE_ELEMENTS):
        yield array[start : start + PIECE_ELEMENTS]


def split_strings(data: bytes | memoryview) -> Iterator[list[bytes]]:
    """Yields the elements of a BYTES tensor in pieces, without an incomplete last element."""
    whole = bytes(data)
    elements: list[bytes] = []
    at, end = 0, len(whole)
    while at + 4 <= end:
        start = at + 4
        at = start + int.from_bytes(whole[at:start], "little")
        if at > end:
            break
        elements.append(whole[start:at])
        if len(elements) == PIECE_ELEMENTS:
            yield elements
            elements = []
    if elements:
        yield elements


class AllNames:
    """A container of every name."""

    def __contains__(self, name: object) -> bool:
        return True


ALL_NAMES = AllNames()


def encode_infer_response(
    response: InferResponse, binary: Container[str], outputs_in_shared_memory: Container[str]
) -> Steps[tuple[bytes, list[Buffer]]]:
    """Returns the JSON part, and the data of the outputs named in `binary`, in order.

    Outputs in `outputs_in_shared_memory` have their data there already. Raises
    HostError with the texts of docs/reference/http.md, "Inference response".
    """
    chunks: list[Buffer] = []
    try:
        parts = [b"{", _model_fields(response.model_name, response.model_version)]
        if response.id:
            parts[0] = b'{"id":%b,' % json.dump(response.id)
        if response.parameters:
            parts += (b',"parameters":', json.dump(response.parameters))
        separator = b',"outputs":['
        for tensor in response.outputs:
            name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
            parts.append(separator)
            separator = b","
            if name in outputs_in_shared_memory:
                parts += (_output_head(name, datatype, shape), b"}")
            elif name in binary:
                data = read_bytes(tensor.data)
                size = len(data) if type(data) is bytes else memoryview(data).nbytes
                parts.append(_binary_output(name, datatype, shape, size))
                if size:
                    chunks.append(data)
            else:
                values = yield from write_tensor(tensor)
                parts += (_output_head(name, datatype, shape), b',"data":', values, b"}")
    except (TypeError, ValueError, BufferError) as error:  # a name, a shape, a value
        raise internal(
            f"response of model '{response.model_name}' cannot be sent: {error}"
        ) from None
    parts.append(b"]}" if response.outputs else b',"outputs":[]}')
    return b"".join(parts), chunks


def _model_fields(name: str, version: int) -> bytes:
    return b'"model_name":%b,"model_version":"%d"' % (json.dump(name), version)


def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Returns the JSON of an output without its closing brace."""
    whole = json.dump({"name": name, "datatype": datatype, "shape": list(shape)})
    return whole[:-1]


def _binary_output(name: str, datatype: str, shape: tuple[int, ...], size: int) -> bytes:
    return _output_head(name, datatype, shape) + b',"parameters":{"binary_data_size":%d}}' % size

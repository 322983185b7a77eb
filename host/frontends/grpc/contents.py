"""Converts typed `InferTensorContents` to tensor bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from host.errors import invalid_argument

_LENGTH = struct.Struct("<I")

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


def contents_bytes(contents: Any, name: str, datatype: str, model: str) -> bytes:
    """The bytes of input `name`, from the only field of `contents` in use.

    Values are little-endian; narrow integers keep their low bytes; BYTES elements get length
    prefixes; no values are an empty tensor. Raises HostError INVALID_ARG
    (docs/reference/protocol.md, 2.3).
    """
    data: bytes | None = None
    for field, field_type, wire, stored in _FIELDS:
        values = getattr(contents, field)
        if values:
            _check_contents(datatype in stored, data, name, datatype, model, field_type)
            data = np.fromiter(values, wire, len(values)).astype(stored[datatype]).tobytes()
    if contents.bytes_contents:
        _check_contents(datatype == "BYTES", data, name, datatype, model, "BYTES")
        data = serialize_bytes(contents.bytes_contents)
    return data or b""


def serialize_bytes(elements: Iterable[bytes]) -> bytes:
    """Serializes BYTES elements: each after its length in 4 little-endian bytes."""
    return b"".join([part for item in elements for part in (_LENGTH.pack(len(item)), item)])


def _check_contents(
    fits: bool, earlier: bytes | None, name: str, datatype: str, model: str, field_type: str
) -> None:
    prefix = f"unexpected explicit tensor data for input tensor '{name}' for model '{model}'"
    if earlier is not None:
        raise invalid_argument(f"{prefix}, binary data was already supplied.")
    if not fits:
        expected = datatype if datatype in _DATATYPES else "<invalid>"
        raise invalid_argument(f"{prefix} of type '{field_type}', expected datatype '{expected}'")

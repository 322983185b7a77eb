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


class ContentsConverter:
    """Converts the typed contents of one input, whole or in parts of the same field.

    Values are little-endian; narrow integers keep their low bytes; BYTES elements get length
    prefixes; no values are an empty tensor (docs/reference/protocol.md, "Input data").
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


def serialize_bytes(elements: Iterable[bytes]) -> bytes:
    """Serializes BYTES elements: each after its length in 4 little-endian bytes."""
    return b"".join([part for item in elements for part in (_LENGTH.pack(len(item)), item)])

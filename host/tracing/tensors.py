"""Formats tensors as text for trace files (docs/reference/protocol.md, "Trace files (mode
triton)").
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from host.errors import HostError
from host.inference.request import Buffer, Tensor
from host.inference.shared_memory_bytes import read_bytes

_TYPES = {
    "BOOL": "u1",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP32": "<f4",
    "FP64": "<f8",
}


def tensor_json(tensor: Tensor) -> dict[str, str]:
    """A tensor as JSON-ready data. The elements of FP16 and BF16 are omitted, as Triton does.

    Elements in memory of a client that is gone are omitted too: the request itself reports that.
    """
    try:
        data = elements(tensor.datatype, read_bytes(tensor.data))
    except HostError:
        data = ""
    return {
        "name": tensor.name,
        "data": data,
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }


def elements(datatype: str, data: Buffer) -> str:
    """Formats the elements of a tensor of a wire datatype, joined by commas.

    Floats have six significant digits. Strings are in quotation marks, and bytes in them that are
    not UTF-8 are written as backslash escapes.
    """
    if datatype == "BYTES":
        return ",".join(f'"{text.decode(errors="backslashreplace")}"' for text in _strings(data))
    kind = _TYPES.get(datatype)
    if kind is None:
        return ""
    values = np.frombuffer(data, dtype=kind).tolist()
    if kind[1:2] == "f":
        return ",".join("%g" % value for value in values)  # noqa: UP031  (same digits as a C++ stream)
    return ",".join(map(str, values))


def _strings(data: Buffer) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        begin = position + 4
        position = begin + int.from_bytes(data[position:begin], "little")
        yield bytes(data[begin:position])

"""Triton's data types: names, codes, numpy types, and the serialised form of BYTES tensors."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


INVALID, BOOL, BYTES, BF16 = 0, 1, 13, 14

NAMES: dict[int, str] = dict(
    enumerate(
        (
            *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
            *("FP16", "FP32", "FP64", "BYTES", "BF16"),
        ),
        BOOL,
    )
)
"""The name of each data type in the client protocol by its code."""

CODES: dict[str, int] = {name: code for code, name in NAMES.items()}
"""The code of each data type by its name (docs/reference/model-module.md, "Constants")."""

TRITON_STRING_TO_NUMPY: dict[str, type[np.generic | bool]] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
"""The numpy type of each data type of a model configuration. ``TYPE_BF16`` has no numpy type."""

CONFIG_CODES = {
    **{name: code for code, name in enumerate(TRITON_STRING_TO_NUMPY, BOOL)},
    "TYPE_BF16": BF16,
}
"""The code of each data type of a model configuration."""

_NUMPY_TYPES = (  # the index is the code
    None,
    *(np.dtype(kind).type for kind in TRITON_STRING_TO_NUMPY.values()),
)

STORAGE: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(kind) for kind in (np.void, *TRITON_STRING_TO_NUMPY.values(), np.uint16)
)
"""The numpy type that stores the elements of each data type; the index is the code.

Elements of BF16 are stored as 16-bit integers.
"""

SIZES: dict[str, int] = {
    name: STORAGE[code].itemsize for name, code in CODES.items() if code != BYTES
}
"""Bytes per element; BYTES is absent because its elements vary in length."""

_CODES: dict[np.dtype[Any], int] = {STORAGE[code]: code for code in range(BOOL, BYTES)}


def triton_string_to_numpy(triton_type_string: str) -> type[np.generic | bool]:
    """Returns the numpy type of a data type.

    Args:
        triton_type_string: name of the data type in a model configuration, for example
            ``TYPE_FP32``.

    Raises:
        KeyError: the name is unknown, or is ``TYPE_BF16``, which has no numpy type.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[np.generic] | None:
    """Returns the numpy type of a data type.

    Args:
        data_type: code of the data type, from 1 (BOOL) to 13 (BYTES)
            (docs/reference/model-module.md, "Constants").

    Returns:
        The numpy type, ``numpy.object_`` for BYTES; None for another code.
    """
    try:
        # By equality, as in Triton: all that equals a code is one, and texts and None have no type.
        for code in range(BOOL, BYTES + 1):
            if data_type == code:
                return _NUMPY_TYPES[code]
    except Exception:  # the result of a comparison may raise anything, as that of arrays does
        return None
    return None


def numpy_to_triton_type(data_type: npt.DTypeLike) -> int | None:
    """Returns the data-type code of a numpy type.

    Args:
        data_type: a numpy type or dtype.

    Returns:
        The code, 13 (BYTES) for ``numpy.object_`` and ``numpy.bytes_``; None for another type, also
        for ``dtype("S5")``.
    """
    for code in range(BOOL, BYTES + 1):
        if _NUMPY_TYPES[code] == data_type:
            return code
    return BYTES if np.bytes_ == data_type else None


def code_of(dtype: np.dtype[Any]) -> int:
    """Returns the data-type code of a tensor that is made from an array of this dtype.

    The result is ``INVALID`` if Triton has no such data type.
    """
    code = _CODES.get(dtype)
    if code is not None:
        return code
    if dtype.kind in "OS":
        return BYTES
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.name == "bfloat16":
        return BF16  # the dtype of the package ml_dtypes, compared by name to avoid the import
    return INVALID


_LENGTH = struct.Struct("<I")
_MIN_NUMPY_BYTES = 1024  # below 1 KiB, the loop takes less time than the numpy dtype
_MAX_ELEMENT_BYTES = 1 << 30  # a numpy dtype cannot be wider than 2 GiB


def serialize_byte_tensor(
    input_tensor: npt.NDArray[Any],
) -> bytes | tuple[()] | None:
    r"""Serialises an array of texts or bytes into the form of a BYTES tensor.

    Args:
        input_tensor: array of any shape, of dtype object or ``S<n>``. Elements of an object array
            that are exactly ``bytes`` are used as they are; all others are encoded as ``str(x)`` in
            UTF-8.

    Returns:
        The elements in C order, each as its length (four little-endian bytes) and its data; ``()``
        for an empty array; None for another dtype (docs/reference/model-module.md, "Functions").

    Examples:
        >>> pb_utils.serialize_byte_tensor(np.array([b"ab"], dtype=np.object_))
        b'\x02\x00\x00\x00ab'
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: Any) -> npt.NDArray[np.object_]:
    """Deserialises the content of a BYTES tensor.

    Args:
        encoded_tensor: the serialised elements, as any object with the buffer protocol.

    Returns:
        A one-dimensional object array of ``bytes``; empty for an empty buffer.

    Raises:
        struct.error: the data ends within an element.
    """
    return decode(encoded_tensor)


def encode(array: npt.NDArray[Any]) -> bytes:
    """Serialises an array of dtype object or ``S<n>``."""
    elements: list[bytes] = [
        item if type(item) is bytes else str(item).encode("utf-8")
        for item in np.asarray(array).ravel().tolist()
    ]
    if not elements:
        return b""
    lengths = list(map(len, elements))
    if lengths.count(lengths[0]) == len(lengths):
        return _LENGTH.pack(lengths[0]).join([b"", *elements])
    parts = [b""] * (2 * len(elements))
    parts[::2] = map(_LENGTH.pack, lengths)
    parts[1::2] = elements
    return b"".join(parts)


def decode(buffer: Any) -> npt.NDArray[np.object_]:
    """Deserialises a buffer into a one-dimensional object array of ``bytes``.

    Elements of equal length are split by numpy, others in a loop. On CPython 3.11, 1,000 elements
    of 32 bytes take 70 us, and 100,000 elements of 0 to 8 bytes take 63 ms. A loop of ``struct``
    calls on a memoryview takes 920 us and 121 ms.

    Raises:
        struct.error: the data ends within an element.
    """
    view = memoryview(buffer)
    if view.nbytes >= _MIN_NUMPY_BYTES:
        array = _decode_equal_lengths(view)
        if array is not None:
            return array
    return _decode_any(view.tobytes())


def _decode_equal_lengths(view: memoryview) -> npt.NDArray[np.object_] | None:
    if not view.c_contiguous:
        return None
    (length,) = _LENGTH.unpack_from(view)
    width = length + _LENGTH.size
    if not 0 < length < _MAX_ELEMENT_BYTES or view.nbytes % width:
        return None
    element = np.dtype({"names": ["n", "data"], "formats": ["<u4", f"V{length}"]})
    elements = np.ndarray(view.nbytes // width, dtype=element, buffer=view)
    if not (elements["n"] == length).all():
        return None
    array: npt.NDArray[np.object_] = elements["data"].astype(np.object_)
    return array


def _decode_any(data: bytes) -> npt.NDArray[np.object_]:
    elements: list[bytes] = []
    append, unpack_length = elements.append, _LENGTH.unpack_from
    position, size = 0, len(data)
    while position < size:
        start = position + 4
        position = start + unpack_length(data, position)[0]
        append(data[start:position])
    if position != size:
        raise struct.error(f"element ends at byte {position} of a buffer of {size} bytes")
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array

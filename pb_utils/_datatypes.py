"""Triton's data types: their names, their codes and the numpy types that carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

INVALID, BOOL, BYTES, BF16 = 0, 1, 13, 14

NAMES = (
    "INVALID",
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
    "BF16",
)
"""The protocol's name of each data-type code."""

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
"""The numpy type of each data type of a model configuration; ``TYPE_BF16`` has none."""

_NUMPY_TYPES = (  # index is the code
    None,
    *(np.dtype(kind).type for kind in TRITON_STRING_TO_NUMPY.values()),
)

STORAGE: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(kind) for kind in (np.void, *TRITON_STRING_TO_NUMPY.values(), np.uint16)
)
"""The numpy type that holds the elements of each code in memory; BF16 lies in 16-bit integers."""

_CODES: dict[np.dtype[Any], int] = {STORAGE[code]: code for code in range(BOOL, BYTES)}


def triton_string_to_numpy(triton_type_string: str) -> type[np.generic | bool]:
    """Return the numpy type for a data type as written in a configuration, e.g. ``TYPE_FP32``.

    Raises:
        KeyError: no numpy type stands for it (``TYPE_BF16``), or it is unknown.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[np.generic] | None:
    """Return the numpy type for a data-type code (1 BOOL ... 12 FP64, 13 BYTES), else None."""
    return _NUMPY_TYPES[data_type] if 0 <= data_type <= BYTES else None


def numpy_to_triton_type(data_type: npt.DTypeLike) -> int | None:
    """Return the code for a numpy type; ``np.object_`` and ``np.bytes_`` give 13, others None."""
    for code in range(BOOL, BYTES + 1):
        if _NUMPY_TYPES[code] == data_type:
            return code
    return BYTES if np.bytes_ == data_type else None


def code_of(dtype: np.dtype[Any]) -> int:
    """Return the code under which an array of this type becomes a tensor, or ``INVALID``."""
    code = _CODES.get(dtype)
    if code is not None:
        return code
    if dtype.kind in "OS":
        return BYTES
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.name == "bfloat16":
        return BF16  # the type of the ml_dtypes package, known by name: no need to import it
    return INVALID

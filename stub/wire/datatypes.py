"""Tensor data types: Triton's numbers, their protocol names, and their sizes."""

from typing import Dict

CODES: Dict[str, int] = {
    "BOOL": 1,
    "UINT8": 2,
    "UINT16": 3,
    "UINT32": 4,
    "UINT64": 5,
    "INT8": 6,
    "INT16": 7,
    "INT32": 8,
    "INT64": 9,
    "FP16": 10,
    "FP32": 11,
    "FP64": 12,
    "BYTES": 13,
    "BF16": 14,
}
"""Protocol name to number (docs/reference/model-module.md, "Constants")."""

NAMES: Dict[int, str] = {code: name for name, code in CODES.items()}

SIZES: Dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
}
"""Bytes per element; BYTES is absent because its elements vary in length."""

"""Replaces an output by its top classes.

Source: docs/reference/http.md, "Classification".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from host.errors import internal, invalid_argument
from host.inference.request import (
    Classification,
    InferResponse,
    Tensor,
    read_bytes,
    serialize_bytes,
)

MAX_ELEMENTS = 1_000_000
"""Maximum number of elements of a classified output."""

_NUMPY_DTYPES: dict[str, Any] = {
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{"FP32": "<f4", "FP64": "<f8"},
}


def classify(response: InferResponse, classes: Classification) -> InferResponse:
    """Replaces the outputs named in `classes` by BYTES tensors of their top classes.

    Raises HostError INVALID_ARG for an output that cannot be classified.
    """
    outputs = [
        _classify_tensor(tensor, classes.counts[tensor.name], classes)
        if tensor.name in classes.counts
        else tensor
        for tensor in response.outputs
    ]
    return InferResponse(
        response.model_name, response.model_version, response.id, outputs, response.parameters
    )


def _classify_tensor(tensor: Tensor, count: int, classes: Classification) -> Tensor:
    """Returns the top `count` classes of each batch element, best first, as a BYTES tensor.

    The elements are `<value>:<index>[:<label>]`. The shape is [batch, classes], or [classes] for a
    model that does not batch.
    """
    dtype = _NUMPY_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise invalid_argument(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    if prod(tensor.shape) > MAX_ELEMENTS:
        raise invalid_argument("classification output tensor too large")
    try:
        batch = tensor.shape[0] if classes.batched and tensor.shape else 1
        rest = prod(tensor.shape[1:]) if classes.batched else prod(tensor.shape)
        rows = np.frombuffer(read_bytes(tensor.data), dtype).reshape(batch, rest)
    except ValueError:
        raise internal(
            f"output tensor shape does not match size of output for '{tensor.name}'"
        ) from None
    labels = classes.labels.get(tensor.name, ())
    width = min(count, rows.shape[1])
    elements = [text for row in rows for text in _format_top_classes(row, width, labels)]
    data = serialize_bytes(elements)
    shape = [batch, width] if classes.batched else [width]
    return Tensor(tensor.name, "BYTES", shape, data)


def _format_top_classes(row: npt.NDArray[Any], width: int, labels: Sequence[str]) -> list[bytes]:
    """Formats the top classes of one batch element. Of equal values, the first comes first."""
    floating = row.dtype.kind == "f"
    keys = np.where(np.isnan(row), -np.inf, row) if floating else row
    if width < len(row):
        # Only values that are not below the last of the top classes need to be sorted.
        least = np.partition(keys, len(row) - width)[len(row) - width]
        candidates = np.flatnonzero(keys >= least)
    else:
        candidates = np.arange(len(row))
    # A stable ascending sort of reversed values, read backwards, keeps the order of equal values.
    backwards = candidates[::-1]
    order = backwards[np.argsort(keys[backwards], kind="stable")][::-1][:width]
    texts = []
    for index in order.tolist():
        value = row[index]
        text = f"{float(value):f}" if floating else str(int(value))
        label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
        texts.append(f"{text}:{index}{label}".encode("utf-8", "surrogateescape"))
    return texts

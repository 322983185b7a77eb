"""JSON schemas and examples of inputs and outputs (docs/reference/protocol.md, "Data types")."""

from __future__ import annotations

import math
from collections.abc import Sequence

from host.frontends.http.api_page.operations import COUNT, STRING, Schema, reference
from host.inference.metadata import TensorMetadata

_MAX_EXAMPLE_ELEMENTS = 1024
_FP32, _FP64 = 3.4028234663852886e38, 1.7976931348623157e308


def _integer(bits: int, signed: bool) -> Schema:
    lowest = -(1 << bits - 1) if signed else 0
    return {
        "type": "integer",
        "minimum": lowest,
        "maximum": lowest + (1 << bits) - 1,
        "format": f"{'' if signed else 'u'}int{bits}",
    }


_ELEMENTS: dict[str, Schema] = {
    "BOOL": {"type": "boolean"},
    **{f"INT{bits}": _integer(bits, True) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": _integer(bits, False) for bits in (8, 16, 32, 64)},
    "FP32": {"type": "number", "format": "float", "minimum": -_FP32, "maximum": _FP32},
    "FP64": {"type": "number", "format": "double", "minimum": -_FP64, "maximum": _FP64},
    "BYTES": STRING,
}


def has_json_form(tensor: TensorMetadata) -> bool:
    """Returns whether a tensor has a JSON form; FP16 and BF16 have only a binary form."""
    return tensor.datatype in _ELEMENTS


def element_schemas() -> dict[str, Schema]:
    """Returns the schema of one element, for each datatype with a JSON form."""
    return _ELEMENTS


def example_shape(shape: Sequence[int]) -> list[int]:
    """Returns the shape with each variable dimension replaced by 1."""
    return [1 if dim < 0 else dim for dim in shape]


def example_values(tensor: TensorMetadata) -> list[object] | None:
    """Returns flat example elements; None if there are too many, or without a JSON form."""
    count = math.prod(example_shape(tensor.shape)) if tensor.shape else 0
    if not has_json_form(tensor) or count > _MAX_EXAMPLE_ELEMENTS:
        return None
    one: object = 1
    if tensor.datatype == "BOOL":
        one = True
    elif tensor.datatype == "BYTES":
        one = "text"
    elif tensor.datatype.startswith("FP"):
        one = 1.0
    return [one] * count


def input_schema(tensor: TensorMetadata, max_batch_size: int) -> Schema:
    """Returns the schema of an input in JSON form.

    `max_batch_size` is the maximum of the first dimension; 0 if the model does not batch.
    """
    return {
        "type": "object",
        "description": f"{tensor.datatype} {tensor.shape}",
        "properties": {
            "name": {"const": tensor.name},
            "datatype": {"const": tensor.datatype},
            "shape": _shape(tensor.shape, max_batch_size),
            "data": {
                "description": "The elements in row-major order, flat or nested like the shape.",
                **values_schema(tensor),
            },
        },
        "required": ["name", "datatype", "shape", "data"],
    }


def values_schema(tensor: TensorMetadata) -> Schema:
    """Returns the schema of a flat array; a fixed shape gives its length."""
    schema: Schema = {"type": "array", "items": reference(f"{tensor.datatype}-element")}
    if all(dim >= 0 for dim in tensor.shape):
        schema["minItems"] = schema["maxItems"] = math.prod(tensor.shape)
    return schema


def output_schema(tensor: TensorMetadata) -> Schema:
    """Returns the schema of an output: JSON data, binary data, or classes as text."""
    return {
        "type": "object",
        "description": f"{tensor.datatype} {tensor.shape}",
        "properties": {
            "name": {"const": tensor.name},
            "datatype": {"enum": list(dict.fromkeys([tensor.datatype, "BYTES"]))},
            "shape": {"type": "array", "items": COUNT},
            "parameters": {"type": "object", "properties": {"binary_data_size": COUNT}},
            "data": {"type": "array"},
        },
        "required": ["name", "datatype", "shape"],
    }


def _shape(shape: Sequence[int], max_batch_size: int) -> Schema:
    """Returns the schema of an array of dimensions that fits the shape."""
    if all(dim >= 0 for dim in shape):
        return {"const": list(shape)}
    dims: list[Schema] = [COUNT if dim < 0 else {"const": dim} for dim in shape]
    if max_batch_size:
        dims[0] = {"type": "integer", "minimum": 1, "maximum": max_batch_size}
    return {
        "type": "array",
        "description": f"{list(shape)}, where -1 means any size.",
        "prefixItems": dims,
        "minItems": len(dims),
        "maxItems": len(dims),
    }

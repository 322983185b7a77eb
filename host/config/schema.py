"""The ModelConfig schema: type names, and helpers for fields and error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2

pb: Any = model_config_pb2
"""The generated protobuf module, which has no type information."""

ModelConfig: TypeAlias = Any
"""An `inference.ModelConfig` message."""

ConfigPart: TypeAlias = Any
"""A message inside a ModelConfig."""

Field: TypeAlias = Any
"""A protobuf field descriptor; its published types lack many attributes."""

ENSEMBLE = "ensemble"

INTEGER_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}

_SCALARS = {
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
}

_ALIASES = {
    "bytes": "type_string",
    "str": "type_string",
    "half": "type_fp16",
    "float16": "type_fp16",
    "float": "type_fp32",
    "float32": "type_fp32",
    "double": "type_fp64",
    "float64": "type_fp64",
    "bfloat16": "type_bf16",
    "int": "type_int32",
    "long": "type_int64",
}
"""Other names of data types, without `type_`. They are too different for a similarity search."""


def new_config() -> ModelConfig:
    """An empty configuration."""
    return pb.ModelConfig()


def is_ensemble(config: ModelConfig) -> bool:
    """Whether the configuration is that of an ensemble."""
    return bool(config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"))


def is_map(field: Field) -> bool:
    """Whether a field is a map; its descriptor says that it is a list of entry messages."""
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def is_repeated(field: Field) -> bool:
    """Whether a field is repeated; protobuf 5 has no property of that name."""
    return isinstance(field.default_value, list)


def field_kind(field: Field) -> str:
    """The protobuf name of the field's type: `int32`, `string`, `enum`, `message`, ..."""
    return _SCALARS[field.type]


def enum_names(field: Field) -> list[str]:
    """The names of the values of an enum field."""
    return [value.name for value in field.enum_type.values]


def expected_value(field: Field) -> str:
    """The words for a valid value of the field, for error messages."""
    if field_kind(field) == "enum":
        return f"one of {', '.join(enum_names(field))}"
    return {"bool": "true or false", "string": "a quoted string"}.get(
        field_kind(field), field_kind(field)
    )


def range_problem(field: Field, value: Any) -> str:
    """The words for the valid range, if an integer or enum value is out of range; else ""."""
    if field_kind(field) == "enum" and value not in field.enum_type.values_by_number:
        return expected_value(field)
    low, high = INTEGER_RANGES.get(field_kind(field), (None, None))
    if low is None or high is None or low <= value <= high:
        return ""
    return f"{field_kind(field)} from {low} to {high}"


def unknown_field(name: str, descriptor: Any) -> tuple[str, str]:
    """The error text for an unknown field name, and a suggestion."""
    names = [field.name for field in descriptor.fields]
    hint = suggestion(name, names) or f", expected one of {', '.join(names)}"
    return f"unknown field '{name}' in {descriptor.name}", hint


def suggestion(word: str, choices: Iterable[str]) -> str:
    """`, did you mean '<choice>'?` for the closest choice, "" if none is close."""
    choice = closest_choice(word, choices)
    return f", did you mean '{choice}'?" if choice else ""


def closest_choice(word: str, choices: Iterable[str]) -> str:
    """The choice that is most similar to the word, "" if none is close."""
    names = {name.lower(): name for name in choices}
    lower = word.lower()
    # Short forms such as FP32 for TYPE_FP32 and GPU for KIND_GPU need their own rule.
    alias = _ALIASES.get(lower.removeprefix("type_"))
    close = [name for name in names if name == alias or name.endswith(f"_{lower}")]
    close = close or difflib.get_close_matches(lower, names, n=1)
    return names[close[0]] if close else ""

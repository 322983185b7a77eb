"""Converts configurations to and from JSON, the form for clients and for models."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format

from host.config.schema import (
    Field,
    ModelConfig,
    enum_names,
    field_kind,
    is_map,
    is_repeated,
    new_config,
    suggestion,
    unknown_field,
)
from host.errors import invalid_argument

_WHOLE = 1e15
"""Whole numbers below this limit are written without a fraction or an exponent."""

# What Triton's parser takes and JSON does not have: single quotes, names of fields without quotes,
# and a comma after the last element. Also matches a string without its closing quote; otherwise a
# failed match would be retried from every character, in quadratic time.
_LENIENT = re.compile(
    r""" "(?:[^"\\]|\\.?)*(?:"|\Z) | '(?:[^'\\]|\\.?)*(?:'|\Z)
    | ,(?=\s*[}\]]) | (?<![\w.$+-])[A-Za-z_]\w*(?=\s*:) """,
    re.X | re.S,
)
_NUMBER = re.compile("-?[0-9]{1,10}")
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_REQUOTED = {"\\'": "'", '"': '\\"'}

# Triton prints these 64-bit fields as strings and all others as numbers
# (docs/reference/configuration-and-scheduling.md, "JSON form").
_NUMBERS_AS_STRINGS = {
    "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
    "inference.ModelSequenceBatching.InitialState.dims",
}


def to_json(config: ModelConfig) -> str:
    """Converts a configuration to compact JSON text."""
    return json.dumps(to_dict(config), separators=(",", ":"), ensure_ascii=False)


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Converts a configuration to JSON-ready data, with the fields in declaration order.

    Message fields and members of a oneof are left out if they are not set. All other fields are
    always present.
    """
    return {
        field.name: _field_value(field, getattr(config, field.name))
        for field in config.DESCRIPTOR.fields
        if not field.has_presence or config.HasField(field.name)
    }


def _field_value(field: Field, value: Any) -> Any:
    if is_map(field):
        element = field.message_type.fields_by_name["value"]
        return {str(key): _value(element, value[key]) for key in sorted(value)}
    if is_repeated(field):
        return [_value(field, element) for element in value]
    return _value(field, value)


def _value(field: Field, value: Any) -> Any:
    if field_kind(field) == "message":
        return to_dict(value)
    if field_kind(field) == "enum":
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field_kind(field) in ("float", "double"):
        return _number(value, field_kind(field) == "float")
    return str(value) if field.full_name in _NUMBERS_AS_STRINGS else value


def _number(value: float, single: bool) -> float | str:
    """The shortest number with this value, or protobuf's word for NaN and infinities."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value.is_integer() and abs(value) < _WHOLE and str(value) != "-0.0":
        return int(value)
    if not single:
        return value
    stored = struct.pack("f", value)
    shortest = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((number for number in shortest if struct.pack("f", number) == stored), value)


def from_json(form: str | Mapping[str, Any]) -> ModelConfig:
    """Converts JSON text or JSON-ready data to a configuration.

    As in Triton, strings in the text may have single quotes, as in `str(dict)`, names of fields
    none, and the last element a comma. Field names may be snake_case or camelCase, enum values have
    any case, numbers may be strings. A value that is no list is the only element of a repeated
    field.
    Raises HostError INVALID_ARG for everything else that the schema does not allow.
    """
    try:
        data = _loads(form) if isinstance(form, str) else form
        if not isinstance(data, Mapping):
            raise invalid_argument(f"model configuration must be a JSON object, got {data!r:.40}")
        config = new_config()
        return json_format.ParseDict(_message(config.DESCRIPTOR, data, ""), config)
    except RecursionError:
        raise invalid_argument("model configuration JSON is nested too deeply") from None
    except (ValueError, json_format.ParseError) as error:
        raise invalid_argument(f"failed to parse model configuration JSON: {error}") from None


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        strict = _LENIENT.sub(_to_json_token, text)
        if strict == text:
            raise
    try:
        return json.loads(strict, strict=False)
    except json.JSONDecodeError as error:
        hint = "; json.dumps writes a Python dict as JSON, str does not" if "'" in text else ""
        raise ValueError(f"{error}{hint}") from None


def _to_json_token(found: re.Match[str]) -> str:
    token = found[0]
    if token == ",":
        return ""
    if token.startswith('"'):
        return token
    if not token.startswith("'"):
        return f'"{token}"'
    inner = _ESCAPE_OR_QUOTE.sub(lambda part: _REQUOTED.get(part[0], part[0]), token[1:-1])
    return f'"{inner}"'


def _message(descriptor: Any, data: Any, path: str) -> Any:
    """Checks a JSON object and renames its fields and enum values to the names in the schema."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise ValueError(f"field '{path}': expected an object, got {data!r:.40}")
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    result: dict[str, Any] = {}
    for name, value in data.items():
        field = fields.get(name)
        if field is None:
            within = f" (field '{path}')" if path else ""
            raise ValueError("".join(unknown_field(str(name), descriptor)) + within)
        if field.name in result:
            raise ValueError(f"field '{field.name}' of {descriptor.name} is given twice")
        result[field.name] = _named(field, value, f"{path}.{field.name}" if path else field.name)
    return result


def _named(field: Field, value: Any, path: str) -> Any:
    if is_map(field) and isinstance(value, Mapping):
        element = field.message_type.fields_by_name["value"]
        return {key: _map_value(element, value[key], f"{path}[{key}]") for key in value}
    if is_repeated(field) and not is_map(field):
        # As in Triton, a value that is no list is the only element, and null is none.
        elements = enumerate(_flatten(value))
        return [_single(field, element, f"{path}[{i}]") for i, element in elements]
    return _single(field, value, path)


def _map_value(field: Field, value: Any, path: str) -> Any:
    if value is None:  # as in Triton, the entry has the default value
        return {} if field_kind(field) == "message" else field.default_value
    return _named(field, value, path)


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for element in value:
            yield from _flatten(element)
    elif value is not None:
        yield value


def _single(field: Field, value: Any, path: str) -> Any:
    if field_kind(field) == "message":
        return _message(field.message_type, value, path)
    if field_kind(field) == "bool" and value in ("true", "false"):
        return value == "true"
    if field_kind(field) != "enum" or value is None:
        return value
    names = enum_names(field)
    known = [name for name in names if isinstance(value, str) and name == value.upper()]
    if known:
        return known[0]
    number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if type(number) is int and number in field.enum_type.values_by_number:
        return number
    hint = suggestion(str(value), names)
    raise ValueError(f"field '{path}': expected one of {', '.join(names)}, got {value!r}{hint}")

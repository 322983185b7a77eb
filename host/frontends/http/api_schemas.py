"""The schemas of the OpenAPI document: of operations, of tensors, and those that have names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from host.crashes.quarantine import QuarantinedRequest
from host.crashes.records import CrashRecord, CrashSummary
from host.frontends.request_headers import Restrictions
from host.inference.metadata import IndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from host.instances.activity import InstanceActivity
from host.logs.log_handler import LogLines
from host.recording.recorder import RecordingSettings

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
JSON = "application/json"
EVENTS = "text/event-stream"
BINARY = "application/octet-stream"

_ERRORS = {
    400: "The request is invalid.",
    403: "The API is restricted, and the required header is missing or wrong.",
    404: "Not found.",
    500: "The JSON of the request is invalid, or the model failed.",
    501: "The server does not support this.",
    503: "The model is not ready, or the server is shutting down.",
}


def object_schema(properties: Schema, required: Iterable[str] = ()) -> Schema:
    """Returns the schema of an object whose members have these schemas; others are allowed."""
    made: Schema = {"type": "object", "properties": properties}
    if required := list(required):
        made["required"] = required
    return made


def array_schema(items: Schema) -> Schema:
    """Returns the schema of an array of any length."""
    return {"type": "array", "items": items}


def reference(name: str) -> Schema:
    """Returns a reference to a schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_body(schema: Schema, required: bool, example: object = None) -> Schema:
    """Returns a JSON request body."""
    media: Schema = {"schema": schema}
    if example is not None:
        media["example"] = example
    return {"required": required, "content": {JSON: media}}


def path_parameter(name: str, description: str) -> Schema:
    """Returns a path parameter that is any text except the empty one."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1},
    }


class Operations:
    """Builds operations; an operation of a restricted category names the required header."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    def operation(
        self,
        category: str,
        tag: str,
        summary: str,
        answer: Schema | None = None,
        *,
        errors: Iterable[int] = (),
        body: Schema | None = None,
        parameters: Iterable[Schema] = (),
        details: str = "",
    ) -> Schema:
        """Returns one operation.

        `answer` is the schema of a successful JSON response, None for an empty body, or a whole
        `content` by media type. `errors` are the error statuses.
        """
        success: Schema = {"description": "Success."}
        if answer is not None:
            media = any("/" in key for key in answer)
            success["content"] = answer if media else {JSON: {"schema": answer}}
        made: Schema = {"tags": [tag], "summary": summary}
        if details:
            made["description"] = details
        if parameters := list(parameters):
            made["parameters"] = parameters
        if body is not None:
            made["requestBody"] = body
        statuses = set(errors)
        if category in self._restrictions:
            statuses.add(403)
            made["security"] = [{category: []}]
        answers = {str(s): {"$ref": f"#/components/responses/Error{s}"} for s in sorted(statuses)}
        made["responses"] = {"200": success, **answers}
        return made

    def security_schemes(self) -> dict[str, Schema]:
        """Returns the security schemes: one header per restricted category."""
        return {
            category: {
                "type": "apiKey",
                "in": "header",
                "name": header,
                "description": f"The header that the restricted API '{category}' requires.",
            }
            for category, header in self._restrictions.required_headers().items()
        }


def error_responses() -> dict[str, Schema]:
    """Returns the error responses that operations refer to."""
    return {
        f"Error{status}": {
            "description": description,
            "content": {JSON: {"schema": reference("Error")}},
        }
        for status, description in _ERRORS.items()
    }


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
    members = {
        "name": {"const": tensor.name},
        "datatype": {"const": tensor.datatype},
        "shape": _shape(tensor.shape, max_batch_size),
        "data": {
            "description": "The elements in row-major order, flat or nested like the shape.",
            **values_schema(tensor),
        },
    }
    return {**object_schema(members, members), "description": f"{tensor.datatype} {tensor.shape}"}


def values_schema(tensor: TensorMetadata) -> Schema:
    """Returns the schema of a flat array; a fixed shape gives its length."""
    schema: Schema = {"type": "array", "items": reference(f"{tensor.datatype}-element")}
    if all(dim >= 0 for dim in tensor.shape):
        schema["minItems"] = schema["maxItems"] = math.prod(tensor.shape)
    return schema


def output_schema(tensor: TensorMetadata) -> Schema:
    """Returns the schema of an output: JSON data, binary data, or classes as text."""
    members = {
        "name": {"const": tensor.name},
        "datatype": {"enum": list(dict.fromkeys([tensor.datatype, "BYTES"]))},
        "shape": array_schema(COUNT),
        "parameters": object_schema({"binary_data_size": COUNT}),
        "data": {"type": "array"},
    }
    schema = object_schema(members, ["name", "datatype", "shape"])
    return {**schema, "description": f"{tensor.datatype} {tensor.shape}"}


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


_BOOLEAN: Schema = {"type": "boolean"}
_INTEGER: Schema = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_UNSIGNED: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
_NUMBER: Schema = {"type": "number", "minimum": -1e308, "maximum": 1e308}
_BODIES = (
    CrashRecord,
    CrashSummary,
    IndexEntry,
    InstanceActivity,
    LogLines,
    ModelMetadata,
    QuarantinedRequest,
    RecordingSettings,
    ServerMetadata,
)
"""The types of bodies that are written or read as they are; their fields are the members."""


def component_schemas() -> dict[str, Schema]:
    """Returns the component schemas that do not depend on the loaded models."""
    _, found = msgspec.json.schema_components(_BODIES, ref_template=reference("{name}")["$ref"])
    for schema in found.values():
        if "description" in schema:  # not with python -OO
            schema["description"] = inspect.cleandoc(schema["description"])
    found["ServerMetadata"]["properties"]["pbhost_version"] = STRING
    return {
        **found,
        "Error": object_schema({"error": STRING}, ["error"]),
        "Statistics": object_schema(
            {"model_stats": array_schema({"type": "object"})}, ["model_stats"]
        ),
        "LoadParameters": {
            **object_schema({"config": {**STRING, "description": "A configuration as JSON text."}}),
            "patternProperties": {"^file:": {"type": "string", "contentEncoding": "base64"}},
            "additionalProperties": False,
        },
        **_request_parameters(),
        **_settings(),
    }


def _request_parameters() -> dict[str, Schema]:
    custom: Schema = {"anyOf": [STRING, _BOOLEAN, _INTEGER, _NUMBER]}
    request = {
        "sequence_id": {"anyOf": [_UNSIGNED, {**STRING, "maxLength": 128}]},
        "sequence_start": _BOOLEAN,
        "sequence_end": _BOOLEAN,
        "priority": _UNSIGNED,
        "timeout": {**_UNSIGNED, "description": "In microseconds."},
        "binary_data_output": _BOOLEAN,
    }
    output = {
        "binary_data": _BOOLEAN,
        "classification": _UNSIGNED,
        "shared_memory_region": STRING,
        "shared_memory_offset": _UNSIGNED,
        "shared_memory_byte_size": _UNSIGNED,
    }
    return {
        "CustomParameter": custom,
        "CustomParameters": {"type": "object", "additionalProperties": custom},
        "RequestParameters": {
            **object_schema(request),
            "additionalProperties": custom,
            "description": "All other members are custom parameters for the model.",
        },
        "OutputParameters": object_schema(output),
    }


def _settings() -> dict[str, Schema]:
    number: Schema = {"type": ["string", "null"], "pattern": "^[0-9]{1,9}$"}
    switch: Schema = {"type": ["boolean", "null"]}
    trace = {
        "trace_level": {
            "type": ["array", "null"],
            "items": {"enum": ["OFF", "TIMESTAMPS", "TENSORS"]},
        },
        "trace_rate": number,
        "trace_count": {"type": ["string", "null"], "pattern": "^(-1|[0-9]{1,9})$"},
        "log_frequency": number,
    }
    log = {
        "log_info": switch,
        "log_warning": switch,
        "log_error": switch,
        "log_verbose_level": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        "log_format": {"enum": ["default", "ISO8601", None]},
    }
    return {"TraceSettings": object_schema(trace), "LogSettings": object_schema(log)}

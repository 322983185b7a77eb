"""The schemas that the OpenAPI paths of a server refer to, by name."""

from __future__ import annotations

from host.frontends.http.api_page.operations import (
    COUNT,
    STRING,
    Schema,
    array_schema,
    object_schema,
    reference,
)

_BOOLEAN: Schema = {"type": "boolean"}
_INTEGER: Schema = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_UNSIGNED: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
_NUMBER: Schema = {"type": "number", "minimum": -1e308, "maximum": 1e308}
_TIME: Schema = {"type": "string", "format": "date-time"}
_STRINGS = array_schema(STRING)
_OBJECTS = array_schema({"type": "object"})


def component_schemas() -> dict[str, Schema]:
    """Returns the component schemas that do not depend on the loaded models."""
    return {
        "Error": object_schema({"error": STRING}, ["error"]),
        **_metadata(),
        **_diagnostics(),
        **_model_control(),
        **_request_parameters(),
        **_settings(),
    }


def _metadata() -> dict[str, Schema]:
    server = {
        "name": STRING,
        "version": STRING,
        "extensions": _STRINGS,
        "pbhost_version": STRING,
    }
    tensor = {"name": STRING, "datatype": STRING, "shape": array_schema(_INTEGER)}
    tensors = array_schema(reference("TensorMetadata"))
    model = {
        "name": STRING,
        "versions": _STRINGS,
        "platform": STRING,
        "inputs": tensors,
        "outputs": tensors,
    }
    return {
        "ServerMetadata": object_schema(server, ["name", "version", "extensions"]),
        "TensorMetadata": object_schema(tensor, tensor),
        "ModelMetadata": object_schema(model, model),
        "Statistics": object_schema({"model_stats": _OBJECTS}, ["model_stats"]),
    }


def _diagnostics() -> dict[str, Schema]:
    lines = {"last": COUNT, "missed": COUNT, "lines": _STRINGS}
    summary = {
        "id": STRING,
        "time": _TIME,
        "model": STRING,
        "version": _INTEGER,
        "instance": STRING,
        "reason": STRING,
    }
    activity = {
        "model": STRING,
        "version": _INTEGER,
        "instance": STRING,
        "pid": _INTEGER,
        "phase": STRING,
        "request_count": _INTEGER,
        "requests": _OBJECTS,
        "stacks": _STRINGS,
        "problem": STRING,
    }
    record = {
        **summary,
        "pid": _INTEGER,
        "signal": STRING,
        "status": {"type": ["integer", "null"]},
        "phase": STRING,
        "request_count": _INTEGER,
        "requests": _OBJECTS,
        "stacks": _STRINGS,
        "output": _STRINGS,
        "recorded_requests": _INTEGER,
    }
    quarantined = {
        "model": STRING,
        "version": _INTEGER,
        "until": _TIME,
        "crashes": _STRINGS,
        "request": {"type": "object"},
    }
    return {
        "LogLines": object_schema(lines, lines),
        "CrashSummary": object_schema(summary, summary),
        "QuarantinedRequest": object_schema(quarantined, quarantined),
        "InstanceActivity": object_schema(activity, activity),
        "CrashRecord": object_schema(record, record),
    }


def _model_control() -> dict[str, Schema]:
    entry = {"name": STRING, "version": STRING, "state": STRING, "reason": STRING}
    config = {**STRING, "description": "A configuration as JSON text."}
    return {
        "IndexEntry": object_schema(entry, ["name"]),
        "LoadParameters": {
            **object_schema({"config": config}),
            "patternProperties": {"^file:": {"type": "string", "contentEncoding": "base64"}},
            "additionalProperties": False,
        },
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

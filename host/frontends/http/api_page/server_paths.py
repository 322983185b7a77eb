"""The OpenAPI paths and schemas that do not depend on the loaded models."""

from __future__ import annotations

from host.frontends.http.api_page.operations import (
    COUNT,
    STRING,
    Operations,
    Schema,
    json_body,
    path_parameter,
    reference,
)

_SERVER = "server"
_CONTROL = "repository"
_MEMORY = "shared memory"
_SETTINGS = "settings"
TAGS = {
    _SERVER: "Health, metadata and statistics.",
    _CONTROL: "List, load and unload models.",
    _MEMORY: "Register shared memory of clients.",
    _SETTINGS: "Change settings of traces and of the log.",
}


def server_paths(operations: Operations) -> dict[str, Schema]:
    """Return the path items of the server by path."""
    make = operations.operation
    return {
        "/v2/health/live": {"get": _health(operations, "Check whether the server is live")},
        "/v2/health/ready": {"get": _health(operations, "Check whether the server is ready")},
        "/v2": {
            "get": make("metadata", _SERVER, "Get the server metadata", reference("ServerMetadata"))
        },
        "/v2/models/stats": {
            "get": make(
                "statistics", _SERVER, "Get the statistics of all models",
                reference("Statistics"), errors=(503,),
            )
        },
        "/v2/overview": {
            "get": make(
                "statistics", _SERVER, "Get what the models and their instances do, in numbers",
                {"type": "object"},
            )
        },
        **_crashes(operations),
        **_control(operations),
        **_memory(operations),
        **_settings(operations),
    }  # fmt: skip


def _health(operations: Operations, summary: str) -> Schema:
    made = operations.operation("health", _SERVER, summary, errors=(503,))
    made["responses"]["400"] = {
        "description": "The server is not live or not ready. The body is empty."
    }
    return made


def _crashes(operations: Operations) -> dict[str, Schema]:
    identifier = path_parameter("id", "The id of a record.")
    summaries = {"crashes": {"type": "array", "items": reference("CrashSummary")}}
    activity = {"instances": {"type": "array", "items": reference("InstanceActivity")}}
    quarantined = {"requests": {"type": "array", "items": reference("QuarantinedRequest")}}
    number, count = {"type": "number"}, {"type": "integer"}
    settings = _object(
        {"seconds": number, "sample": number, "max_requests": count, "max_bytes": count}
    )
    activities = {**_object(activity), "required": ["instances"]}
    model = path_parameter("model", "The name of a model.")
    after = {
        "name": "after",
        "in": "query",
        "description": "The number of the last line that the client has.",
        "schema": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
    }
    share: Schema = {
        "oneOf": [
            {"type": "null"},
            {
                **_object({"version": COUNT, "percent": {"type": "number", "maximum": 100}}),
                "required": ["version", "percent"],
            },
        ]
    }
    return {
        "/v2/logging/lines": {
            "get": operations.operation(
                "logging", _SERVER, "Get the last lines of the log", reference("LogLines"),
                errors=(400, 503), parameters=[after],
            )
        },
        "/v2/stacks": {
            "get": operations.operation(
                "logging", _SERVER, "Get what all instances do now", activities
            )
        },
        "/v2/models/{model}/stacks": {
            "get": operations.operation(
                "logging", _SERVER, "Get what the instances of a model do now", activities,
                errors=(404,), parameters=[model],
            )
        },
        "/v2/models/{model}/traffic": {
            "get": operations.operation(
                "model-repository", _SERVER, "Get how requests are split between versions",
                {"type": "object"}, errors=(400, 404, 503), parameters=[model],
            ),
            "post": operations.operation(
                "model-repository", _SERVER, "Change how requests are split between versions",
                {"type": "object"}, errors=(400, 404, 503),
                body=json_body(_object({"canary": share, "shadow": share}), True),
                parameters=[model],
            ),
        },
        "/v2/models/{model}/record": {
            "post": operations.operation(
                "recording", _SERVER, "Record the requests to a model, and stream the recording",
                errors=(400, 404, 501), body=json_body(settings, False), parameters=[model],
            )
        },
        "/v2/quarantine": {
            "get": operations.operation(
                "logging", _SERVER, "List the requests that are refused, as they ended processes",
                {**_object(quarantined), "required": ["requests"]},
            )
        },
        "/v2/quarantine/lift": {
            "post": operations.operation(
                "model-repository", _SERVER, "Accept the requests in quarantine again",
                _object({"lifted": {"type": "integer"}}), errors=(400, 404),
                body=json_body(_object({"model": STRING}), False, {"model": ""}),
            )
        },
        "/v2/crashes": {
            "get": operations.operation(
                "logging", _SERVER, "List the crashes of model processes, the newest first",
                {**_object(summaries), "required": ["crashes"]},
            )
        },
        "/v2/crashes/{id}": {
            "get": operations.operation(
                "logging", _SERVER, "Get the record of a crash", reference("CrashRecord"),
                errors=(404,), parameters=[identifier],
            )
        },
        "/v2/crashes/{id}/requests": {
            "get": operations.operation(
                "recording", _SERVER, "Get the tensors of the requests that ran at a crash",
                {**_object({"requests": {"type": "array", "items": {"type": "object"}}}),
                 "required": ["requests"]},
                errors=(400, 404, 501), parameters=[identifier],
            )
        },
    }  # fmt: skip


def _control(operations: Operations) -> dict[str, Schema]:
    make = operations.operation
    model = path_parameter("model", "The name of a model in the repository.")
    index = make(
        "model-repository", _CONTROL, "List all models and the state of their versions",
        {"type": "array", "items": reference("IndexEntry")},
        errors=(400, 500, 503),
        body=json_body(_object({"ready": {"type": "boolean"}}), False, {"ready": False}),
    )  # fmt: skip
    load = make(
        "model-repository", _CONTROL, "Load or reload a model",
        errors=(400, 500, 503),
        body=json_body(_object({"parameters": reference("LoadParameters")}), False),
        parameters=[model],
    )  # fmt: skip
    dependents = _object({"unload_dependents": {"type": "boolean"}})
    unload = make(
        "model-repository", _CONTROL, "Unload a model",
        errors=(400, 500, 503),
        body=json_body(_object({"parameters": dependents}), False),
        parameters=[model],
    )  # fmt: skip
    return {
        "/v2/repository/index": {"post": index},
        "/v2/repository/models/{model}/load": {"post": load},
        "/v2/repository/models/{model}/unload": {"post": unload},
    }


def _memory(operations: Operations) -> dict[str, Schema]:
    make = operations.operation
    region = path_parameter("region", "The name of a region.")
    handle = {**_object({"b64": {"type": "string", "contentEncoding": "base64"}})}
    handle["required"] = ["b64"]
    bodies: dict[str, Schema] = {
        "system": {
            **_object({"key": STRING, "offset": COUNT, "byte_size": COUNT}),
            "required": ["key", "byte_size"],
        },
        "cuda": {
            **_object({"raw_handle": handle, "device_id": COUNT, "byte_size": COUNT}),
            "required": ["raw_handle", "device_id", "byte_size"],
        },
    }
    paths: dict[str, Schema] = {}
    for kind, body in bodies.items():
        base = f"/v2/{kind}sharedmemory"
        regions: Schema = {"type": "array", "items": {"type": "object"}}
        for path, parameters, what in (
            (base, [], "all regions"),
            (f"{base}/region/{{region}}", [region], "a region"),
        ):
            about = f"of {kind} shared memory"
            paths[f"{path}/status"] = {
                "get": make(
                    "shared-memory", _MEMORY, f"Get the status of {what} {about}", regions,
                    errors=(404,), parameters=parameters,
                )
            }  # fmt: skip
            paths[f"{path}/unregister"] = {
                "post": make(
                    "shared-memory", _MEMORY, f"Unregister {what} {about}",
                    errors=(500, 501), parameters=parameters,
                )
            }  # fmt: skip
        paths[f"{base}/region/{{region}}/register"] = {
            "post": make(
                "shared-memory", _MEMORY, f"Register a region of {kind} shared memory",
                errors=(400, 500, 501), body=json_body(body, True), parameters=[region],
            )
        }  # fmt: skip
    return paths


def _settings(operations: Operations) -> dict[str, Schema]:
    model = path_parameter("model", "The name of a loaded model.")
    paths: dict[str, Schema] = {}
    for path, category, name, parameters, errors in (
        ("/v2/trace/setting", "trace", "TraceSettings", [], (400, 500, 501, 503)),
        ("/v2/models/{model}/trace/setting", "trace", "TraceSettings", [model],
         (400, 404, 500, 501, 503)),
        ("/v2/logging", "logging", "LogSettings", [], (400, 500, 501, 503)),
    ):  # fmt: skip
        get = (404, 400, 503) if parameters else (503,)
        what = "trace settings" if category == "trace" else "log settings"
        if parameters:
            what += " of a model"
        paths[path] = {
            "get": operations.operation(
                category, _SETTINGS, f"Get the {what}", {"type": "object"},
                errors=get, parameters=parameters,
            ),
            "post": operations.operation(
                category, _SETTINGS, f"Change the {what}", {"type": "object"},
                errors=errors, body=json_body(reference(name), True), parameters=parameters,
            ),
        }  # fmt: skip
    return paths


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def schemas() -> dict[str, Schema]:
    """Return the component schemas that all paths refer to."""
    boolean: Schema = {"type": "boolean"}
    integer: Schema = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    unsigned: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
    number: Schema = {"type": "number", "minimum": -1e308, "maximum": 1e308}
    custom: Schema = {"anyOf": [STRING, boolean, integer, number]}
    size = {"shared_memory_region": STRING}
    size |= {"shared_memory_offset": unsigned, "shared_memory_byte_size": unsigned}
    tensor = _object(
        {"name": STRING, "datatype": STRING, "shape": {"type": "array", "items": integer}}
    )
    tensor["required"] = ["name", "datatype", "shape"]
    tensor_list = {"type": "array", "items": reference("TensorMetadata")}
    names = {"type": "array", "items": STRING}
    crash = {
        "id": STRING,
        "time": {"type": "string", "format": "date-time"},
        "model": STRING,
        "version": integer,
        "instance": STRING,
        "reason": STRING,
    }
    requests = {"type": "array", "items": {"type": "object"}}
    activity = {
        "model": STRING,
        "version": integer,
        "instance": STRING,
        "pid": integer,
        "phase": STRING,
        "request_count": integer,
        "requests": requests,
        "stacks": names,
        "problem": STRING,
    }
    record = {
        **crash,
        "pid": integer,
        "signal": STRING,
        "status": {"type": ["integer", "null"]},
        "phase": STRING,
        "request_count": integer,
        "requests": requests,
        "stacks": names,
        "output": names,
        "recorded_requests": integer,
    }
    quarantined = {
        "model": STRING,
        "version": integer,
        "until": {"type": "string", "format": "date-time"},
        "crashes": names,
        "request": {"type": "object"},
    }
    setting: Schema = {"type": ["string", "null"], "pattern": "^[0-9]{1,9}$"}
    return {
        "Error": {**_object({"error": STRING}), "required": ["error"]},
        "ServerMetadata": {
            **_object(
                {
                    "name": STRING,
                    "version": STRING,
                    "extensions": names,
                    "pbhost_version": STRING,
                }
            ),
            "required": ["name", "version", "extensions"],
        },
        "TensorMetadata": tensor,
        "ModelMetadata": {
            **_object(
                {
                    "name": STRING,
                    "versions": names,
                    "platform": STRING,
                    "inputs": tensor_list,
                    "outputs": tensor_list,
                }
            ),
            "required": ["name", "versions", "platform", "inputs", "outputs"],
        },
        "Statistics": {
            **_object({"model_stats": {"type": "array", "items": {"type": "object"}}}),
            "required": ["model_stats"],
        },
        "LogLines": {
            **_object({"last": COUNT, "missed": COUNT, "lines": names}),
            "required": ["last", "missed", "lines"],
        },
        "CrashSummary": {**_object(crash), "required": list(crash)},
        "QuarantinedRequest": {**_object(quarantined), "required": list(quarantined)},
        "InstanceActivity": {**_object(activity), "required": list(activity)},
        "CrashRecord": {**_object(record), "required": list(record)},
        "IndexEntry": {
            **_object({"name": STRING, "version": STRING, "state": STRING, "reason": STRING}),
            "required": ["name"],
        },
        "LoadParameters": {
            **_object({"config": {**STRING, "description": "A configuration as JSON text."}}),
            "patternProperties": {
                "^file:": {"type": "string", "contentEncoding": "base64"},
            },
            "additionalProperties": False,
        },
        "CustomParameter": custom,
        "CustomParameters": {"type": "object", "additionalProperties": custom},
        "RequestParameters": {
            **_object(
                {
                    "sequence_id": {"anyOf": [unsigned, {**STRING, "maxLength": 128}]},
                    "sequence_start": boolean,
                    "sequence_end": boolean,
                    "priority": unsigned,
                    "timeout": {**unsigned, "description": "In microseconds."},
                    "binary_data_output": boolean,
                }
            ),
            "additionalProperties": custom,
            "description": "All other members are custom parameters for the model.",
        },
        "OutputParameters": _object(
            {"binary_data": boolean, "classification": unsigned, **size}
        ),
        "TraceSettings": _object(
            {
                "trace_level": {
                    "type": ["array", "null"],
                    "items": {"enum": ["OFF", "TIMESTAMPS", "TENSORS"]},
                },
                "trace_rate": setting,
                "trace_count": {"type": ["string", "null"], "pattern": "^(-1|[0-9]{1,9})$"},
                "log_frequency": setting,
            }
        ),
        "LogSettings": _object(
            {
                "log_info": {"type": ["boolean", "null"]},
                "log_warning": {"type": ["boolean", "null"]},
                "log_error": {"type": ["boolean", "null"]},
                "log_verbose_level": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
                "log_format": {"enum": ["default", "ISO8601", None]},
            }
        ),
    }  # fmt: skip

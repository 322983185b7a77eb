"""The OpenAPI paths of a server: health, metadata, model control, settings, and diagnostics."""

from __future__ import annotations

from host.frontends.http.api_schemas import (
    COUNT,
    STRING,
    Operations,
    Schema,
    array_schema,
    json_body,
    object_schema,
    path_parameter,
    reference,
)

SERVER_TAG = "server"
_CONTROL = "repository"
_MEMORY = "shared memory"
_SETTINGS = "settings"
TAGS = {
    SERVER_TAG: "Health, metadata and statistics.",
    _CONTROL: "List, load and unload models.",
    _MEMORY: "Register shared memory of clients.",
    _SETTINGS: "Change settings of traces and of the log.",
}


def server_paths(operations: Operations) -> dict[str, Schema]:
    """Returns the path items by path; they do not depend on the loaded models."""
    make = operations.operation
    return {
        "/v2/health/live": {"get": _health(operations, "Check whether the server is live")},
        "/v2/health/ready": {"get": _health(operations, "Check whether the server is ready")},
        "/v2": {
            "get": make(
                "metadata", SERVER_TAG, "Get the server metadata", reference("ServerMetadata")
            )
        },
        "/v2/models/stats": {
            "get": make(
                "statistics", SERVER_TAG, "Get the statistics of all models",
                reference("Statistics"), errors=(503,),
            )
        },
        **_traffic(operations),
        **_control(operations),
        **_memory(operations),
        **_settings(operations),
    }  # fmt: skip


def _health(operations: Operations, summary: str) -> Schema:
    made = operations.operation("health", SERVER_TAG, summary, errors=(503,))
    made["responses"]["400"] = {
        "description": "The server is not live or not ready. The body is empty."
    }
    return made


def _traffic(operations: Operations) -> dict[str, Schema]:
    model = path_parameter("model", "The name of a model.")
    percent = {"type": "number", "maximum": 100}
    version = object_schema({"version": COUNT, "percent": percent}, ["version", "percent"])
    share: Schema = {"oneOf": [{"type": "null"}, version]}
    return {
        "/v2/models/{model}/traffic": {
            "get": operations.operation(
                "model-repository", SERVER_TAG, "Get how requests are split between versions",
                {"type": "object"}, errors=(400, 404, 503), parameters=[model],
            ),
            "post": operations.operation(
                "model-repository", SERVER_TAG, "Change how requests are split between versions",
                {"type": "object"}, errors=(400, 404, 503),
                body=json_body(object_schema({"canary": share, "shadow": share}), True),
                parameters=[model],
            ),
        }
    }  # fmt: skip


def _control(operations: Operations) -> dict[str, Schema]:
    make = operations.operation
    model = path_parameter("model", "The name of a model in the repository.")
    index = make(
        "model-repository", _CONTROL, "List all models and the state of their versions",
        array_schema(reference("IndexEntry")),
        errors=(400, 500, 503),
        body=json_body(object_schema({"ready": {"type": "boolean"}}), False, {"ready": False}),
    )  # fmt: skip
    load = make(
        "model-repository", _CONTROL, "Load or reload a model",
        errors=(400, 500, 503),
        body=json_body(object_schema({"parameters": reference("LoadParameters")}), False),
        parameters=[model],
    )  # fmt: skip
    dependents = object_schema({"unload_dependents": {"type": "boolean"}})
    unload = make(
        "model-repository", _CONTROL, "Unload a model",
        errors=(400, 500, 503),
        body=json_body(object_schema({"parameters": dependents}), False),
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
    handle = object_schema({"b64": {"type": "string", "contentEncoding": "base64"}}, ["b64"])
    cuda = {"raw_handle": handle, "device_id": COUNT, "byte_size": COUNT}
    bodies = {
        "system": object_schema(
            {"key": STRING, "offset": COUNT, "byte_size": COUNT}, ["key", "byte_size"]
        ),
        "cuda": object_schema(cuda, cuda),
    }
    paths: dict[str, Schema] = {}
    for kind, body in bodies.items():
        base = f"/v2/{kind}sharedmemory"
        regions = array_schema({"type": "object"})
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


_MODEL = path_parameter("model", "The name of a model.")


def diagnostics_paths(operations: Operations) -> dict[str, Schema]:
    """Returns the path items by path; they do not depend on the loaded models."""
    return {
        **_activity(operations),
        **_recordings(operations),
        **_quarantine(operations),
        **_crashes(operations),
    }


def _activity(operations: Operations) -> dict[str, Schema]:
    after = {
        "name": "after",
        "in": "query",
        "description": "The number of the last line that the client has.",
        "schema": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
    }
    instances = array_schema(reference("InstanceActivity"))
    activity = object_schema({"instances": instances}, ["instances"])
    return {
        "/v2/overview": {
            "get": operations.operation(
                "statistics", SERVER_TAG, "Get what the models and their instances do, in numbers",
                {"type": "object"},
            )
        },
        "/v2/logging/lines": {
            "get": operations.operation(
                "logging", SERVER_TAG, "Get the last lines of the log", reference("LogLines"),
                errors=(400, 503), parameters=[after],
            )
        },
        "/v2/stacks": {
            "get": operations.operation(
                "logging", SERVER_TAG, "Get what all instances do now", activity
            )
        },
        "/v2/models/{model}/stacks": {
            "get": operations.operation(
                "logging", SERVER_TAG, "Get what the instances of a model do now", activity,
                errors=(404,), parameters=[_MODEL],
            )
        },
    }  # fmt: skip


def _recordings(operations: Operations) -> dict[str, Schema]:
    number, count = {"type": "number"}, {"type": "integer"}
    settings = object_schema(
        {"seconds": number, "sample": number, "max_requests": count, "max_bytes": count}
    )
    return {
        "/v2/models/{model}/record": {
            "post": operations.operation(
                "recording", SERVER_TAG,
                "Record the requests to a model, and stream the recording",
                errors=(400, 404, 501), body=json_body(settings, False), parameters=[_MODEL],
            )
        }
    }  # fmt: skip


def _quarantine(operations: Operations) -> dict[str, Schema]:
    requests = array_schema(reference("QuarantinedRequest"))
    return {
        "/v2/quarantine": {
            "get": operations.operation(
                "logging", SERVER_TAG,
                "List the requests that are refused, as they ended processes",
                object_schema({"requests": requests}, ["requests"]),
            )
        },
        "/v2/quarantine/lift": {
            "post": operations.operation(
                "model-repository", SERVER_TAG, "Accept the requests in quarantine again",
                object_schema({"lifted": {"type": "integer"}}), errors=(400, 404),
                body=json_body(object_schema({"model": STRING}), False, {"model": ""}),
            )
        },
    }  # fmt: skip


def _crashes(operations: Operations) -> dict[str, Schema]:
    identifier = path_parameter("id", "The id of a record.")
    crashes = array_schema(reference("CrashSummary"))
    requests = array_schema({"type": "object"})
    return {
        "/v2/crashes": {
            "get": operations.operation(
                "logging", SERVER_TAG, "List the crashes of model processes, the newest first",
                object_schema({"crashes": crashes}, ["crashes"]),
            )
        },
        "/v2/crashes/{id}": {
            "get": operations.operation(
                "logging", SERVER_TAG, "Get the record of a crash", reference("CrashRecord"),
                errors=(404,), parameters=[identifier],
            )
        },
        "/v2/crashes/{id}/requests": {
            "get": operations.operation(
                "recording", SERVER_TAG, "Get the tensors of the requests that ran at a crash",
                object_schema({"requests": requests}, ["requests"]),
                errors=(400, 404, 501), parameters=[identifier],
            )
        },
    }  # fmt: skip

"""The OpenAPI paths of a server: health, metadata, model control, settings, and diagnostics."""

from __future__ import annotations

import re

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
from host.frontends.http.routes import find_route

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

_NAMES = {
    "model": path_parameter("model", "The name of a model."),
    "region": path_parameter("region", "The name of a region."),
    "id": path_parameter("id", "The id of a record."),
}
_AFTER: Schema = {
    "name": "after",
    "in": "query",
    "description": "The number of the last line that the client has.",
    "schema": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
}
_NOT_READY: Schema = {"description": "The server is not live or not ready. The body is empty."}
_BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS = array_schema(_OBJECT)


class _Paths(dict[str, Schema]):
    """The path items by path."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def add(
        self,
        request: str,
        tag: str,
        summary: str,
        answer: Schema | None = None,
        errors: tuple[int, ...] = (),
        body: Schema | None = None,
        query: tuple[Schema, ...] = (),
    ) -> None:
        """Adds an operation; `request` is its method and its path."""
        method, path = request.split()
        route = find_route(path.encode())
        assert route is not None
        parameters = [_NAMES[name] for name in re.findall("{(.*?)}", path)]
        self.setdefault(path, {})[method.lower()] = self._operations.operation(
            route.endpoint.category, tag, summary, answer,
            errors=errors, body=body, parameters=[*parameters, *query],
        )  # fmt: skip


def server_paths(operations: Operations) -> dict[str, Schema]:
    """Returns the path items by path; they do not depend on the loaded models."""
    paths = _Paths(operations)
    _add_states(paths)
    _add_control(paths)
    _add_memory(paths, "system", {"key": STRING, "offset": COUNT, "byte_size": COUNT}, ("offset",))
    handle = object_schema({"b64": _BASE64}, ["b64"])
    _add_memory(paths, "cuda", {"raw_handle": handle, "device_id": COUNT, "byte_size": COUNT})
    _add_settings(paths)
    _add_diagnostics(paths)
    return paths


# fmt: off
def _add_states(paths: _Paths) -> None:
    for state in ("live", "ready"):
        path, summary = f"/v2/health/{state}", f"Check whether the server is {state}"
        paths.add(f"GET {path}", _SERVER, summary, None, (503,))
        paths[path]["get"]["responses"]["400"] = _NOT_READY
    paths.add("GET /v2", _SERVER, "Get the server metadata", reference("ServerMetadata"))
    paths.add("GET /v2/models/stats", _SERVER, "Get the statistics of all models",
              reference("Statistics"), (503,))


def _add_control(paths: _Paths) -> None:
    traffic = "/v2/models/{model}/traffic"
    percent = {"type": "number", "maximum": 100}
    version = object_schema({"version": COUNT, "percent": percent}, ["version", "percent"])
    share: Schema = {"oneOf": [{"type": "null"}, version]}
    paths.add(f"GET {traffic}", _SERVER, "Get how requests are split between versions",
              _OBJECT, (400, 404, 503))
    paths.add(f"POST {traffic}", _SERVER, "Change how requests are split between versions",
              _OBJECT, (400, 404, 503),
              json_body(object_schema({"canary": share, "shadow": share}), True))
    errors = (400, 500, 503)
    load = object_schema({"parameters": reference("LoadParameters")})
    dependents = object_schema({"unload_dependents": _BOOLEAN})
    unload = object_schema({"parameters": dependents})
    paths.add("POST /v2/repository/index", _CONTROL,
              "List all models and the state of their versions",
              array_schema(reference("IndexEntry")), errors,
              json_body(object_schema({"ready": _BOOLEAN}), False, {"ready": False}))
    paths.add("POST /v2/repository/models/{model}/load", _CONTROL, "Load or reload a model",
              None, errors, json_body(load, False))
    paths.add("POST /v2/repository/models/{model}/unload", _CONTROL, "Unload a model",
              None, errors, json_body(unload, False))


def _add_memory(
    paths: _Paths, kind: str, region: Schema, optional: tuple[str, ...] = ()
) -> None:
    base, about = f"/v2/{kind}sharedmemory", f"of {kind} shared memory"
    for path, what in ((base, "all regions"), (f"{base}/region/{{region}}", "a region")):
        paths.add(f"GET {path}/status", _MEMORY, f"Get the status of {what} {about}",
                  _OBJECTS, (404,))
        paths.add(f"POST {path}/unregister", _MEMORY, f"Unregister {what} {about}",
                  None, (500, 501))
    body = object_schema(region, [name for name in region if name not in optional])
    paths.add(f"POST {base}/region/{{region}}/register", _MEMORY, f"Register a region {about}",
              None, (400, 500, 501), json_body(body, True))


def _add_settings(paths: _Paths) -> None:
    trace, log = (json_body(reference(f"{kind}Settings"), True) for kind in ("Trace", "Log"))
    for path, what, body, unknown in (
        ("/v2/trace/setting", "trace settings", trace, ()),
        ("/v2/models/{model}/trace/setting", "trace settings of a model", trace, (400, 404)),
        ("/v2/logging", "log settings", log, ()),
    ):
        paths.add(f"GET {path}", _SETTINGS, f"Get the {what}", _OBJECT, (*unknown, 503))
        paths.add(f"POST {path}", _SETTINGS, f"Change the {what}", _OBJECT,
                  (*unknown, 400, 500, 501, 503), body)


def _add_diagnostics(paths: _Paths) -> None:
    activity = object_schema({"instances": array_schema(reference("InstanceActivity"))},
                             ["instances"])
    quarantined = array_schema(reference("QuarantinedRequest"))
    crashes = array_schema(reference("CrashSummary"))
    paths.add("GET /v2/overview", _SERVER,
              "Get what the models and their instances do, in numbers", _OBJECT)
    paths.add("GET /v2/logging/lines", _SERVER, "Get the last lines of the log",
              reference("LogLines"), (400, 503), query=(_AFTER,))
    paths.add("GET /v2/stacks", _SERVER, "Get what all instances do now", activity)
    paths.add("GET /v2/models/{model}/stacks", _SERVER,
              "Get what the instances of a model do now", activity, (404,))
    paths.add("POST /v2/models/{model}/record", _SERVER,
              "Record the requests to a model, and stream the recording", None, (400, 404, 501),
              json_body(reference("RecordingSettings"), False))
    paths.add("GET /v2/quarantine", _SERVER,
              "List the requests that are refused, as they ended processes",
              object_schema({"requests": quarantined}, ["requests"]))
    paths.add("POST /v2/quarantine/lift", _SERVER, "Accept the requests in quarantine again",
              object_schema({"lifted": {"type": "integer"}}), (400, 404),
              json_body(object_schema({"model": STRING}), False, {"model": ""}))
    paths.add("GET /v2/crashes", _SERVER,
              "List the crashes of model processes, the newest first",
              object_schema({"crashes": crashes}, ["crashes"]))
    paths.add("GET /v2/crashes/{id}", _SERVER, "Get the record of a crash",
              reference("CrashRecord"), (404,))
    paths.add("GET /v2/crashes/{id}/requests", _SERVER,
              "Get the tensors of the requests that ran at a crash",
              object_schema({"requests": _OBJECTS}, ["requests"]), (400, 404, 501))

"""The OpenAPI paths that show what a server does and did: log, stacks, crashes, recordings."""

from __future__ import annotations

from host.frontends.http.api_page.operations import (
    STRING,
    Operations,
    Schema,
    array_schema,
    json_body,
    object_schema,
    path_parameter,
    reference,
)
from host.frontends.http.api_page.server_paths import SERVER_TAG

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

"""The OpenAPI paths of the OpenAI routes that loaded models speak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from host.frontends.http.api_schemas import (
    EVENTS,
    JSON,
    STRING,
    Operations,
    Schema,
    json_body,
)
from host.frontends.openai.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    MAX_IMAGES,
    SPEECH,
    TRANSCRIPTIONS,
)

TAG = "OpenAI clients"

_OBJECT: Schema = {"type": "object"}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": STRING,
    },
    "required": ["role", "content"],
}
_GENERATION: Mapping[str, Schema] = {
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
}
_TEXTS: Schema = {"anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_ERROR: Schema = {
    "description": "An error in OpenAI's form.",
    "content": {
        JSON: {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": STRING,
                            "type": STRING,
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                        "required": ["message", "type", "param", "code"],
                    }
                },
                "required": ["error"],
            }
        }
    },
}


def openai_paths(names: Mapping[str, Sequence[str]], operations: Operations) -> dict[str, Schema]:
    """Returns the path items of the routes; `names` has the models of each route."""
    user = [{"role": "user", "content": "Hello"}]
    paths: dict[str, Schema] = {}
    if models := names.get(CHAT):
        paths["/v1/chat/completions"] = _post(
            operations, "Ask a model for a chat completion", models,
            {"messages": _MESSAGES, **_GENERATION}, {"messages": user, "max_tokens": 16},
        )  # fmt: skip
        response = {"input": STRING, "instructions": STRING, **_GENERATION}
        response["max_output_tokens"] = response.pop("max_tokens")
        paths["/v1/responses"] = _post(
            operations, "Ask a model for a response", models, response,
            {"input": "Hello", "max_output_tokens": 16},
        )  # fmt: skip
    if models := names.get(COMPLETIONS):
        paths["/v1/completions"] = _post(
            operations, "Ask a model to complete a text", models,
            {"prompt": STRING, **_GENERATION}, {"prompt": "Hello", "max_tokens": 16},
        )  # fmt: skip
    if models := names.get(EMBEDDINGS):
        paths["/v1/embeddings"] = _post(
            operations, "Ask a model for the embeddings of texts", models,
            {"input": _TEXTS, "encoding_format": {"enum": ["float", "base64"]}},
            {"input": "Hello"},
        )  # fmt: skip
    if models := names.get(IMAGES):
        paths["/v1/images/generations"] = _post(
            operations, "Ask a model for images", models,
            {"prompt": STRING, "n": {"type": "integer", "minimum": 1, "maximum": MAX_IMAGES}},
            {"prompt": "A cat"},
        )  # fmt: skip
    if models := names.get(SPEECH):
        paths["/v1/audio/speech"] = _post(
            operations, "Ask a model to speak a text", models,
            {"input": STRING, "voice": STRING}, {"input": "Hello", "voice": "default"},
            {"audio/*": {}},
        )  # fmt: skip
    if models := names.get(TRANSCRIPTIONS):
        paths["/v1/audio/transcriptions"] = _transcriptions(operations, models)
    if paths:
        listed = operations.operation("metadata", TAG, "List the models", _OBJECT)
        paths["/v1/models"] = {"get": _with_errors(listed)}
    return paths


def _post(
    operations: Operations,
    summary: str,
    models: Sequence[str],
    properties: Mapping[str, Schema],
    example: Mapping[str, object],
    answer: Schema | None = None,
) -> Schema:
    """Returns the path item of an inference route; the first property is required."""
    schema: Schema = {
        "type": "object",
        "properties": {"model": {"enum": list(models)}, **properties},
        "required": ["model", next(iter(properties))],
    }
    answer = {JSON: {"schema": _OBJECT}} if answer is None else answer
    if "stream" in properties:
        answer[EVENTS] = {}
    operation = operations.operation(
        "inference", TAG, summary, answer,
        body=json_body(schema, True, {"model": models[0], **example}),
        details="Fields, and what becomes of them: docs/reference/openai.md.",
    )  # fmt: skip
    return {"post": _with_errors(operation)}


def _transcriptions(operations: Operations, models: Sequence[str]) -> Schema:
    """Returns the path item of the route whose requests are forms."""
    schema: Schema = {
        "type": "object",
        "properties": {
            "model": {"enum": list(models)},
            "file": {"type": "string", "format": "binary"},
            "language": STRING,
            "prompt": STRING,
            "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["model", "file"],
    }
    operation = operations.operation(
        "inference", TAG, "Ask a model for the text of a sound", {JSON: {"schema": _OBJECT}},
        body={"required": True, "content": {"multipart/form-data": {"schema": schema}}},
        details="Fields, and what becomes of them: docs/reference/openai.md.",
    )  # fmt: skip
    return {"post": _with_errors(operation)}


def _with_errors(operation: Schema) -> Schema:
    operation["responses"] = {"200": operation["responses"]["200"], "default": _ERROR}
    return operation

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
    object_schema,
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
_ROLE: Schema = {"enum": ["system", "developer", "user", "assistant", "tool"]}
_MESSAGE = object_schema({"role": _ROLE, "content": STRING}, ["role", "content"])
_GENERATION: Mapping[str, Schema] = {
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
}
_TEXTS: Schema = {"anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_FILE: Schema = {"type": "string", "format": "binary"}
_MAYBE: Schema = {"type": ["string", "null"]}
_ERROR_MEMBERS = {"message": STRING, "type": STRING, "param": _MAYBE, "code": _MAYBE}
_ERROR_BODY = object_schema({"error": object_schema(_ERROR_MEMBERS, _ERROR_MEMBERS)}, ["error"])
_ERROR: Schema = {
    "description": "An error in OpenAI's form.",
    "content": {JSON: {"schema": _ERROR_BODY}},
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
        temperature = {"type": "number", "minimum": 0, "maximum": 1}
        paths["/v1/audio/transcriptions"] = _post(
            operations, "Ask a model for the text of a sound", models,
            {"file": _FILE, "language": STRING, "prompt": STRING, "temperature": temperature},
        )  # fmt: skip
    if paths:
        listed = operations.operation("metadata", TAG, "List the models", _OBJECT)
        paths["/v1/models"] = {"get": _with_errors(listed)}
    return paths


def _post(
    operations: Operations,
    summary: str,
    models: Sequence[str],
    properties: Mapping[str, Schema],
    example: Mapping[str, object] | None = None,
    answer: Schema | None = None,
) -> Schema:
    """Returns the path item of an inference route; the first property is required.

    A request without an example is a form.
    """
    members: Schema = {"model": {"enum": list(models)}, **properties}
    schema = object_schema(members, ["model", next(iter(properties))])
    if example is None:
        body: Schema = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    else:
        body = json_body(schema, True, {"model": models[0], **example})
    answer = {JSON: {"schema": _OBJECT}} if answer is None else answer
    if "stream" in properties:
        answer[EVENTS] = {}
    operation = operations.operation(
        "inference", TAG, summary, answer, body=body,
        details="Fields, and what becomes of them: docs/reference/openai.md.",
    )  # fmt: skip
    return {"post": _with_errors(operation)}


def _with_errors(operation: Schema) -> Schema:
    operation["responses"] = {"200": operation["responses"]["200"], "default": _ERROR}
    return operation

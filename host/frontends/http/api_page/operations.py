"""Builds OpenAPI operations: parameters, bodies, responses and access restrictions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from host.frontends.restrictions import Restrictions

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

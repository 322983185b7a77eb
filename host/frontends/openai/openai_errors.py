"""The errors of the OpenAI routes: their statuses, types, codes and JSON form.

The rules are in docs/reference/openai.md, Errors.
"""

from __future__ import annotations

from host.errors import ErrorCode, HostError
from host.frontends.error_status import HttpError, error_headers
from host.frontends.http import json_text as json
from host.frontends.http1.asgi import Header

_INVALID_REQUEST = "invalid_request_error"
_DO_NOT_RETRY: Header = (b"x-should-retry", b"false")


class OpenAIError(HttpError):
    """An error with the fields of the error object of OpenAI."""

    def __init__(
        self,
        message: str,
        code: str | None,
        param: str | None = None,
        status: int = 400,
        kind: str = _INVALID_REQUEST,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message, status, headers)
        self.error_code = code
        self.param = param
        self.kind = kind

    def body(self) -> bytes:
        """Returns the JSON form of the error."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.error_code,
        }
        return json.dump({"error": error})


def from_host_error(error: HostError) -> OpenAIError:
    """Converts an error of the core, of a model or of HTTP; its text stays."""
    if isinstance(error, OpenAIError):
        return error
    message = error.message or error.code.value
    if isinstance(error, HttpError):
        kind, code = _INVALID_REQUEST, None
        if error.status == 403:
            kind, code = "permission_error", "restricted"
        return OpenAIError(message, code, None, error.status, kind, error.headers)
    match error.code:
        case ErrorCode.UNAVAILABLE:
            retry: Header = (b"retry-after", b"1")
            return OpenAIError(message, "unavailable", None, 503, "server_error", (retry,))
        case ErrorCode.UNAUTHENTICATED:
            kind, code = "authentication_error", "invalid_api_key"
            return OpenAIError(message, code, None, 401, kind, error_headers(error))
        case ErrorCode.PERMISSION_DENIED:
            return OpenAIError(message, "permission_denied", None, 403, "permission_error")
        case ErrorCode.RESOURCE_EXHAUSTED:
            kind, code = "rate_limit_error", "rate_limit_exceeded"
            return OpenAIError(message, code, None, 429, kind, error_headers(error))
        case ErrorCode.INTERNAL | ErrorCode.CANCELLED:
            # Clients repeat requests with status 500; a model that failed would run three times.
            return OpenAIError(message, None, None, 500, "server_error", (_DO_NOT_RETRY,))
        case ErrorCode.NOT_FOUND:
            return OpenAIError(message, "model_not_found", "model", 404)
    return OpenAIError(message, None)


def model_failure(message: str) -> OpenAIError:
    """A model gave an output that cannot be answered."""
    return OpenAIError(message, None, None, 500, "server_error", (_DO_NOT_RETRY,))


def unknown_model(name: str) -> OpenAIError:
    """No ready model has this name."""
    message = f"there is no model '{name}' here; GET /v1/models lists those that can be asked"
    return OpenAIError(message, "model_not_found", "model", 404)


def unsupported_route(message: str) -> OpenAIError:
    """The model does not have the inputs or outputs that the route needs."""
    return OpenAIError(message, "unsupported_route", "model")


def unsupported_field(message: str, name: str) -> OpenAIError:
    """The model does not take a field."""
    return OpenAIError(message, "unsupported_field", name)


def invalid_type(place: str, expected: str, value: object) -> OpenAIError:
    """A value has the wrong JSON type."""
    message = f"'{place}' must be {expected}, got {_json_type(value)}"
    return OpenAIError(message, "invalid_type", place)


def invalid_value(message: str, place: str) -> OpenAIError:
    """A value is out of range, or contradicts another one."""
    return OpenAIError(message, "invalid_value", place)


def missing_field(place: str) -> OpenAIError:
    """A required field is absent."""
    return OpenAIError(f"'{place}' is missing", "missing_field", place)


def invalid_json(message: str) -> OpenAIError:
    """The body is not a JSON object."""
    return OpenAIError(message, "invalid_json")


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"

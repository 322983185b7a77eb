"""Checks the fields of requests: JSON types, ranges and contradictions.

The fields are in docs/how-to/openai.md. `null` means that a field is absent. Fields that are not
checked here pass as they are: models may have inputs of any name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.openai.checks import (
    Check,
    array,
    boolean,
    check_member,
    integer,
    json_object,
    not_empty_string,
    number,
    one_of,
    string,
)
from host.frontends.openai.errors import (
    OpenAIError,
    invalid_json,
    invalid_type,
    invalid_value,
    missing_field,
)

Fields = dict[str, Any]
CHAT, COMPLETIONS, EMBEDDINGS = "chat", "completions", "embeddings"
TRANSCRIPTIONS, IMAGES, SPEECH = "transcriptions", "images", "speech"
MAX_CHOICES = 128
"""The maximum number of choices of a request, over all its prompts."""
MAX_IMAGES = 10
"""The maximum number of images of one request."""
MAX_TEXTS = 2048
"""The maximum number of texts of one embeddings request."""

_MAX_STOPS = 16
_INT64 = 1 << 63
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_IMAGE_SIZE = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_fields(body: bytes, route: str, defaults: Mapping[str, Any] | None = None) -> Fields:
    """Parse and check a body; return its fields without those that are `null`.

    Raises OpenAIError.
    """
    return check_fields(parse_object(body), route, defaults)


def parse_object(body: bytes) -> Fields:
    """Parse a JSON object in UTF-8; the first of equal names counts. Raises OpenAIError."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        text = f"the body is not JSON: byte {error.start} is not valid UTF-8"
        raise invalid_json(text) from None
    try:
        document = json.parse(body)
    except HostError as error:
        raise invalid_json(f"the body is not JSON: {error.message}") from None
    if not isinstance(document, dict):
        raise invalid_json("the body is not a JSON object")
    return {name: value for name, value in document.items() if value is not None}


def check_fields(sent: Fields, route: str, defaults: Mapping[str, Any] | None = None) -> Fields:
    """Check the fields of a request, with the defaults of its model. Raises OpenAIError."""
    fields = {**_defaults(defaults or {}, sent, route), **sent}
    for name in _REQUIRED[route]:
        if name not in fields:
            raise missing_field(name)
    for name, check in _CHECKS[route].items():
        if name in fields:
            check(name, fields[name])
    _check_contradictions(fields, route)
    return fields


def _defaults(defaults: Mapping[str, Any], sent: Fields, route: str) -> Fields:
    """Return the defaults of a route: without the fields that only other routes have."""
    others = _OTHER_FIELDS[route]
    chosen = {name: value for name, value in defaults.items() if name not in others}
    if "max_tokens" in sent:  # a default of the newer name would take its place
        chosen.pop("max_completion_tokens", None)
    return chosen


def check_known_fields(fields: Mapping[str, Any], routes: Collection[str] | None) -> None:
    """Check the values of fields as default values of `routes`; None means any route.

    A value must fit one of the routes that have the field. Raises OpenAIError.
    """
    known = [route for route in _CHECKS if routes is None or route in routes]
    for name, value in fields.items():
        complaints: list[OpenAIError] = []
        checks = [_CHECKS[route][name] for route in known or _CHECKS if name in _CHECKS[route]]
        for check in checks:
            try:
                check(name, value)
            except OpenAIError as error:
                complaints.append(error)
        if checks and len(complaints) == len(checks):
            raise complaints[0]


def _check_contradictions(fields: Fields, route: str) -> None:
    if "stream_options" in fields and not fields.get("stream"):
        raise invalid_value("'stream_options' needs 'stream': true", "stream_options")
    if route == CHAT:
        for old in ("functions", "function_call"):
            if old in fields:
                raise invalid_value(f"'{old}' is not supported; use 'tools'", old)
        if "top_logprobs" in fields and not fields.get("logprobs"):
            raise invalid_value("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        choice = fields.get("tool_choice")
        if choice is not None and choice != "none" and "tools" not in fields:
            raise invalid_value("'tool_choice' needs 'tools'", "tool_choice")
        if isinstance(choice, dict):
            name = choice["function"]["name"]
            if name not in [tool["function"]["name"] for tool in fields["tools"]]:
                raise invalid_value(
                    f"'tool_choice' names '{name}', which is not in 'tools'", "tool_choice"
                )
    if route == COMPLETIONS:
        if fields.get("max_tokens") == 0 and not fields.get("echo"):
            raise invalid_value("'max_tokens' of 0 needs 'echo': true", "max_tokens")
        if fields.get("best_of", 1) != 1:
            raise invalid_value("'best_of' must be 1", "best_of")


# Fields of generation


def _stop(place: str, value: Any) -> None:
    if type(value) is str:
        not_empty_string(place, value)
        return
    if type(value) is not list:
        raise invalid_type(place, "a string or an array of strings", value)
    array(place, value, 1, _MAX_STOPS)
    for index, text in enumerate(value):
        not_empty_string(f"{place}[{index}]", text)


def _stream_options(place: str, value: Any) -> None:
    json_object(place, value)
    for name in ("include_usage", "include_obfuscation"):
        check_member(place, value, name, boolean, required=False)


def _logit_bias(place: str, value: Any) -> None:
    json_object(place, value)
    for token, bias in value.items():
        number(-100, 100)(f"{place}.{token[:80]}", bias)


def _metadata(place: str, value: Any) -> None:
    json_object(place, value)
    for name, text in value.items():
        string(f"{place}.{name[:80]}", text)


def _tools(place: str, value: Any) -> None:
    array(place, value, 1, 128)
    for index, tool in enumerate(value):
        inner = f"{place}[{index}]"
        json_object(inner, tool)
        check_member(inner, tool, "type", one_of(("function",)))
        check_member(inner, tool, "function", _function)


def _function(place: str, value: Any) -> None:
    json_object(place, value)
    check_member(place, value, "name", _tool_name)
    check_member(place, value, "description", string, required=False)
    check_member(place, value, "parameters", json_object, required=False)
    check_member(place, value, "strict", boolean, required=False)


def _tool_name(place: str, value: Any) -> None:
    string(place, value)
    if not _TOOL_NAME.fullmatch(value):
        raise invalid_value(
            f"'{place}' must have 1 to 64 characters of a-z, A-Z, 0-9, '_' and '-'", place
        )


def _tool_choice(place: str, value: Any) -> None:
    if type(value) is str:
        one_of(("none", "auto", "required"))(place, value)
        return
    if not isinstance(value, dict):
        raise invalid_type(place, "a string or an object", value)
    check_member(place, value, "type", one_of(("function",)))
    check_member(place, value, "function", json_object)
    check_member(f"{place}.function", value["function"], "name", _tool_name)


def _response_format(place: str, value: Any) -> None:
    json_object(place, value)
    check_member(place, value, "type", one_of(("text", "json_object", "json_schema")))
    if value["type"] == "json_schema":
        check_member(place, value, "json_schema", json_object)
        inner, schema = f"{place}.json_schema", value["json_schema"]
        check_member(inner, schema, "name", _tool_name)
        check_member(inner, schema, "schema", json_object, required=False)
        check_member(inner, schema, "strict", boolean, required=False)
        check_member(inner, schema, "description", string, required=False)


# Messages


def _messages(place: str, value: Any) -> None:
    array(place, value, 1, None)
    for index, message in enumerate(value):
        _message(f"{place}[{index}]", message)


def _message(place: str, value: Any) -> None:
    json_object(place, value)
    check_member(place, value, "role", one_of(_ROLES))
    role = value["role"]
    if role == "tool":
        check_member(place, value, "tool_call_id", string)
    check_member(place, value, "name", string, required=False)
    check_member(place, value, "tool_calls", _tool_calls, required=False)
    may_lack_content = role == "assistant" and value.get("tool_calls") is not None
    check_member(place, value, "content", _content, required=not may_lack_content)


def _tool_calls(place: str, value: Any) -> None:
    array(place, value, 1, None)
    for index, call in enumerate(value):
        inner = f"{place}[{index}]"
        json_object(inner, call)
        check_member(inner, call, "id", string)
        check_member(inner, call, "type", one_of(("function",)))
        check_member(inner, call, "function", json_object)
        check_member(f"{inner}.function", call["function"], "name", string)
        check_member(f"{inner}.function", call["function"], "arguments", string)


def _content(place: str, value: Any) -> None:
    if type(value) is str:
        return
    if type(value) is not list:
        raise invalid_type(place, "a string or an array", value)
    array(place, value, 1, None)
    for index, part in enumerate(value):
        inner = f"{place}[{index}]"
        json_object(inner, part)
        check_member(inner, part, "type", one_of(tuple(_PARTS)))
        name, check = _PARTS[part["type"]]
        check_member(inner, part, name, check)


def _image_url(place: str, value: Any) -> None:
    json_object(place, value)
    check_member(place, value, "url", string)
    check_member(place, value, "detail", string, required=False)
    if not value["url"].startswith("data:image/"):
        raise invalid_value(
            "images must be sent along, as data:image/...;base64,...: this server fetches nothing",
            f"{place}.url",
        )


def _input_audio(place: str, value: Any) -> None:
    json_object(place, value)
    check_member(place, value, "data", string)
    check_member(place, value, "format", one_of(("wav", "mp3")))


_PARTS: dict[str, tuple[str, Check]] = {
    "text": ("text", string),
    "refusal": ("refusal", string),
    "image_url": ("image_url", _image_url),
    "input_audio": ("input_audio", _input_audio),
    "file": ("file", json_object),
}


# Prompts and texts


def _texts(high: int, may_be_empty: bool) -> Check:
    """Check a text, an array of texts, an array of token ids, or an array of such arrays."""
    text = string if may_be_empty else not_empty_string

    def check(place: str, value: Any) -> None:
        if type(value) is str:
            text(place, value)
            return
        if type(value) is not list:
            raise invalid_type(place, "a string or an array", value)
        if value and type(value[0]) is int:
            _token_ids(place, value)
            return
        array(place, value, 1, high)
        is_text = type(value[0]) is str
        for index, element in enumerate(value):
            (text if is_text else _token_ids)(f"{place}[{index}]", element)

    return check


def _token_ids(place: str, value: Any) -> None:
    array(place, value, 1, None)
    for index, token in enumerate(value):
        integer(0, _INT64 - 1)(f"{place}[{index}]", token)


# Sounds


def _sound(place: str, value: Any) -> None:
    if type(value) is not bytes:
        raise invalid_type(place, "a file", value)
    if not value:
        raise invalid_value(f"'{place}' must not be empty", place)


def _size(place: str, value: Any) -> None:
    string(place, value)
    if value != "auto" and not _IMAGE_SIZE.fullmatch(value):
        text = f"'{place}' must be auto, or look like 1024x1024; got '{value[:80]}'"
        raise invalid_value(text, place)


def _granularities(place: str, value: Any) -> None:
    array(place, value, 1, 2)
    for index, entry in enumerate(value):
        one_of(("word", "segment"))(f"{place}[{index}]", entry)


_COMMON: dict[str, Check] = {
    "model": string,
    "stream": boolean,
    "stream_options": _stream_options,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "seed": integer(-_INT64, _INT64 - 1),
    "stop": _stop,
    "n": integer(1, MAX_CHOICES),
    "logit_bias": _logit_bias,
    "user": string,
}
_CHECKS: dict[str, dict[str, Check]] = {
    CHAT: {
        **_COMMON,
        "messages": _messages,
        "max_completion_tokens": integer(1),
        "max_tokens": integer(1),
        "logprobs": boolean,
        "top_logprobs": integer(0, 20),
        "tools": _tools,
        "tool_choice": _tool_choice,
        "parallel_tool_calls": boolean,
        "response_format": _response_format,
        "safety_identifier": string,
        "prompt_cache_key": string,
        "metadata": _metadata,
        "reasoning_effort": string,
        "verbosity": string,
        "modalities": lambda place, value: array(place, value, 1, None),
        "audio": json_object,
        "prediction": json_object,
        "web_search_options": json_object,
        "service_tier": string,
        "store": boolean,
    },
    COMPLETIONS: {
        **_COMMON,
        "prompt": _texts(MAX_CHOICES, may_be_empty=True),
        "max_tokens": integer(0),
        "logprobs": integer(0, 5),
        "echo": boolean,
        "suffix": string,
        "best_of": integer(1),
    },
    EMBEDDINGS: {
        "model": string,
        "input": _texts(MAX_TEXTS, may_be_empty=False),
        "dimensions": integer(1),
        "encoding_format": one_of(("float", "base64")),
        "user": string,
    },
    TRANSCRIPTIONS: {
        "model": string,
        "file": _sound,
        "language": string,
        "prompt": string,
        "response_format": one_of(("json", "text", "srt", "verbose_json", "vtt")),
        "temperature": number(0, 1),
        "timestamp_granularities": _granularities,
        "stream": boolean,
        "include": lambda place, value: array(place, value, 0, None),
        "chunking_strategy": string,
    },
    IMAGES: {
        "model": string,
        "prompt": not_empty_string,
        "n": integer(1, MAX_IMAGES),
        "size": _size,
        "quality": string,
        "style": string,
        "background": string,
        "moderation": string,
        "output_format": one_of(("png", "jpeg", "webp")),
        "output_compression": integer(0, 100),
        "response_format": one_of(("b64_json", "url")),
        "stream": boolean,
        "partial_images": integer(0, 3),
        "user": string,
    },
    SPEECH: {
        "model": string,
        "input": not_empty_string,
        "voice": string,
        "instructions": string,
        "response_format": one_of(("mp3", "opus", "aac", "flac", "wav", "pcm")),
        "speed": number(0.25, 4),
        "stream_format": one_of(("audio", "sse")),
    },
}
_REQUIRED = {
    CHAT: ("model", "messages"),
    COMPLETIONS: ("model", "prompt"),
    EMBEDDINGS: ("model", "input"),
    TRANSCRIPTIONS: ("model", "file"),
    IMAGES: ("model", "prompt"),
    SPEECH: ("model", "input"),
}
KNOWN_FIELDS = {
    route: frozenset(checks) | {"functions", "function_call"} for route, checks in _CHECKS.items()
}
"""The fields of OpenAI by route."""
_JSON_ROUTES = (CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, SPEECH)
_OTHER_FIELDS = {
    route: frozenset().union(*(KNOWN_FIELDS[other] for other in _JSON_ROUTES)) - known
    for route, known in KNOWN_FIELDS.items()
}
"""The fields that only other routes have, by route."""


def scheduling_field(name: str, value: Any) -> int:
    """Return the value of `priority`, or of `timeout` in microseconds. Raises OpenAIError."""
    integer(0, (1 << 64) - 1)(name, value)
    return int(value)


def model_name(fields: Fields) -> str:
    """Return the model that a request names. Raises OpenAIError."""
    if "model" not in fields:
        raise missing_field("model")
    string("model", fields["model"])
    return str(fields["model"])


def too_deep() -> OpenAIError:
    """The body has more nested arrays or objects than can be written as JSON again."""
    return invalid_json("the body is nested too deeply")

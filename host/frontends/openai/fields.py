"""Checks the fields of requests: JSON types, ranges and contradictions.

The fields are in docs/reference/openai.md. `null` means that a field is absent. Fields that are not
checked here pass as they are: models may have inputs of any name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.openai.checks import (
    Check,
    array,
    boolean,
    image_size,
    integer,
    json_object,
    messages,
    not_empty_string,
    number,
    one_of,
    response_format,
    sound,
    stop,
    stream_options,
    string,
    texts,
    tool_choice,
    tools,
    values,
)
from host.frontends.openai.openai_errors import (
    OpenAIError,
    invalid_json,
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

_INT64 = 1 << 63


def parse_object(body: bytes) -> Fields:
    """Parses a JSON object in UTF-8; the first of equal names counts. Raises OpenAIError."""
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
    """Checks the fields of a request, with the defaults of its model. Raises OpenAIError."""
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
    """Returns the defaults of a route: without the fields that only other routes have."""
    others = _OTHER_FIELDS[route]
    chosen = {name: value for name, value in defaults.items() if name not in others}
    if "max_tokens" in sent:  # a default of the newer name would take its place
        chosen.pop("max_completion_tokens", None)
    return chosen


def check_known_fields(fields: Mapping[str, Any], routes: Collection[str] | None) -> None:
    """Checks the values of fields as default values of `routes`; None means any route.

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


_COMMON: dict[str, Check] = {
    "model": string,
    "stream": boolean,
    "stream_options": stream_options,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "seed": integer(-_INT64, _INT64 - 1),
    "stop": stop,
    "n": integer(1, MAX_CHOICES),
    "logit_bias": values(number(-100, 100)),
    "user": string,
}
_CHECKS: dict[str, dict[str, Check]] = {
    CHAT: {
        **_COMMON,
        "messages": messages,
        "max_completion_tokens": integer(1),
        "max_tokens": integer(1),
        "logprobs": boolean,
        "top_logprobs": integer(0, 20),
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": boolean,
        "response_format": response_format,
        "safety_identifier": string,
        "prompt_cache_key": string,
        "metadata": values(string),
        "reasoning_effort": string,
        "verbosity": string,
        "modalities": array(1),
        "audio": json_object,
        "prediction": json_object,
        "web_search_options": json_object,
        "service_tier": string,
        "store": boolean,
    },
    COMPLETIONS: {
        **_COMMON,
        "prompt": texts(MAX_CHOICES, string),
        "max_tokens": integer(0),
        "logprobs": integer(0, 5),
        "echo": boolean,
        "suffix": string,
        "best_of": integer(1),
    },
    EMBEDDINGS: {
        "model": string,
        "input": texts(MAX_TEXTS, not_empty_string),
        "dimensions": integer(1),
        "encoding_format": one_of(("float", "base64")),
        "user": string,
    },
    TRANSCRIPTIONS: {
        "model": string,
        "file": sound,
        "language": string,
        "prompt": string,
        "response_format": one_of(("json", "text", "srt", "verbose_json", "vtt")),
        "temperature": number(0, 1),
        "timestamp_granularities": array(1, 2, one_of(("word", "segment"))),
        "stream": boolean,
        "include": array(0),
        "chunking_strategy": string,
    },
    IMAGES: {
        "model": string,
        "prompt": not_empty_string,
        "n": integer(1, MAX_IMAGES),
        "size": image_size,
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
    """Returns the value of `priority`, or of `timeout` in microseconds. Raises OpenAIError."""
    integer(0, (1 << 64) - 1)(name, value)
    return int(value)


def model_name(fields: Fields) -> str:
    """Returns the model that a request names. Raises OpenAIError."""
    if "model" not in fields:
        raise missing_field("model")
    string("model", fields["model"])
    return str(fields["model"])


def too_deep() -> OpenAIError:
    """The body has more nested arrays or objects than can be written as JSON again."""
    return invalid_json("the body is nested too deeply")

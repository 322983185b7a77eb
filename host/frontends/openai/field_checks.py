"""Checks of the fields that are more than one JSON value: messages, tools, texts, formats.

They combine the checks in `checks`, and raise OpenAIError like those.
"""

from __future__ import annotations

import re
from typing import Any

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
from host.frontends.openai.errors import invalid_type, invalid_value

_MAX_STOPS = 16
_MAX_TOOLS = 128
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_MAY_LACK_CONTENT = ("assistant", "tool", "function")
_IMAGE_SIZE = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def stop(place: str, value: Any) -> None:
    """Checks a text, or an array of at most 16 texts."""
    if type(value) is str:
        not_empty_string(place, value)
        return
    if type(value) is not list:
        raise invalid_type(place, "a string or an array of strings", value)
    array(place, value, 1, _MAX_STOPS)
    for index, text in enumerate(value):
        not_empty_string(f"{place}[{index}]", text)


def stream_options(place: str, value: Any) -> None:
    """Checks the options of a stream."""
    json_object(place, value)
    for name in ("include_usage", "include_obfuscation"):
        check_member(place, value, name, boolean, required=False)


def logit_bias(place: str, value: Any) -> None:
    """Checks an object of numbers from -100 to 100, by token id."""
    json_object(place, value)
    for token, bias in value.items():
        number(-100, 100)(f"{place}.{token[:80]}", bias)


def metadata(place: str, value: Any) -> None:
    """Checks an object of texts."""
    json_object(place, value)
    for name, text in value.items():
        string(f"{place}.{name[:80]}", text)


def tools(place: str, value: Any) -> None:
    """Checks an array of at most 128 functions."""
    array(place, value, 1, _MAX_TOOLS)
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


def tool_choice(place: str, value: Any) -> None:
    """Checks `none`, `auto`, `required`, or the choice of one function."""
    if type(value) is str:
        one_of(("none", "auto", "required"))(place, value)
        return
    if not isinstance(value, dict):
        raise invalid_type(place, "a string or an object", value)
    check_member(place, value, "type", one_of(("function",)))
    check_member(place, value, "function", json_object)
    check_member(f"{place}.function", value["function"], "name", _tool_name)


def response_format(place: str, value: Any) -> None:
    """Checks the format of the text of an answer, and the form of a schema."""
    json_object(place, value)
    check_member(place, value, "type", one_of(("text", "json_object", "json_schema")))
    if value["type"] == "json_schema":
        check_member(place, value, "json_schema", json_object)
        inner, schema = f"{place}.json_schema", value["json_schema"]
        check_member(inner, schema, "name", _tool_name)
        check_member(inner, schema, "schema", json_object, required=False)
        check_member(inner, schema, "strict", boolean, required=False)
        check_member(inner, schema, "description", string, required=False)


def messages(place: str, value: Any) -> None:
    """Checks the messages of a chat."""
    array(place, value, 1, None)
    for index, message in enumerate(value):
        _message(f"{place}[{index}]", message)


def _message(place: str, value: Any) -> None:
    """Checks a message, with what other servers write: null and empty members count as absent."""
    json_object(place, value)
    check_member(place, value, "role", one_of(_ROLES))
    role = value["role"]
    if role == "tool":  # Ollama writes the name of the tool instead
        check_member(place, value, "tool_call_id", _call_id, value.get("tool_name") is None)
    for name in ("name", "refusal"):
        check_member(place, value, name, string, required=False)
    check_member(place, value, "tool_calls", _tool_calls, required=False)
    check_member(place, value, "function_call", _called_function, required=False)
    check_member(place, value, "audio", json_object, required=False)
    may_lack_content = role in _MAY_LACK_CONTENT
    if not may_lack_content or value.get("content") != []:
        check_member(place, value, "content", _content, required=not may_lack_content)


def _tool_calls(place: str, value: Any) -> None:
    array(place, value, 0, None)
    for index, call in enumerate(value):
        inner = f"{place}[{index}]"
        json_object(inner, call)
        check_member(inner, call, "id", _call_id, required=False)
        check_member(inner, call, "type", one_of(("function",)), required=False)
        check_member(inner, call, "function", _called_function)


def _call_id(place: str, value: Any) -> None:
    if type(value) not in (str, int):  # TGI has written numbers
        raise invalid_type(place, "a string", value)


def _called_function(place: str, value: Any) -> None:
    json_object(place, value)
    check_member(place, value, "name", string)
    arguments = value.get("arguments")  # JSON text; TGI and Ollama write the object itself
    if arguments is not None and type(arguments) is not str and not isinstance(arguments, dict):
        raise invalid_type(f"{place}.arguments", "a string or an object", arguments)


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


def texts(high: int, may_be_empty: bool) -> Check:
    """Returns the check of a text, an array of texts, an array of token ids, or one of such arrays.

    `high`: the maximum number of texts, or of arrays of token ids.
    """
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
        integer(0, (1 << 63) - 1)(f"{place}[{index}]", token)


def sound(place: str, value: Any) -> None:
    """Checks a file that a form has sent."""
    if type(value) is not bytes:
        raise invalid_type(place, "a file", value)
    if not value:
        raise invalid_value(f"'{place}' must not be empty", place)


def image_size(place: str, value: Any) -> None:
    """Checks `auto`, or a width and a height such as `1024x1024`."""
    string(place, value)
    if value != "auto" and not _IMAGE_SIZE.fullmatch(value):
        text = f"'{place}' must be auto, or look like 1024x1024; got '{value[:80]}'"
        raise invalid_value(text, place)


def granularities(place: str, value: Any) -> None:
    """Checks an array of `word` and `segment`."""
    array(place, value, 1, 2)
    for index, entry in enumerate(value):
        one_of(("word", "segment"))(f"{place}[{index}]", entry)

"""Checks of JSON values: of single ones, of arrays and objects, and of the larger fields.

`place` says where a value stands in the body, such as `messages[0].role`. A wrong value raises
OpenAIError, with the place and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from host.frontends.openai.openai_errors import invalid_type, invalid_value, missing_field

Check = Callable[[str, Any], None]
"""Checks the value at a place of the body. Raises OpenAIError."""


def anything(place: str, value: Any) -> None:
    """Accepts any value."""


def string(place: str, value: Any) -> None:
    """Checks that a value is a string."""
    if type(value) is not str:
        raise invalid_type(place, "a string", value)


def boolean(place: str, value: Any) -> None:
    """Checks that a value is a boolean."""
    if type(value) is not bool:
        raise invalid_type(place, "a boolean", value)


def number(low: float, high: float) -> Check:
    """Returns the check of a number from `low` to `high`."""

    def check(place: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise invalid_type(place, "a number", value)
        if not low <= value <= high:
            raise invalid_value(f"'{place}' must be from {low} to {high}, got {value}", place)

    return check


def integer(low: int, high: int | None = None) -> Check:
    """Returns the check of an integer from `low` to `high`; None is no limit."""

    def check(place: str, value: Any) -> None:
        if type(value) is not int:
            raise invalid_type(place, "an integer", value)
        if value < low or (high is not None and value > high):
            limits = f"{low} or more" if high is None else f"from {low} to {high}"
            raise invalid_value(f"'{place}' must be {limits}, got {value}", place)

    return check


def one_of(allowed: Sequence[str]) -> Check:
    """Returns the check of a string that must be one of several."""

    def check(place: str, value: Any) -> None:
        string(place, value)
        if value not in allowed:
            names = ", ".join(f"'{name}'" for name in allowed)
            raise invalid_value(f"'{place}' must be one of {names}; got '{value[:80]}'", place)

    return check


def not_empty_string(place: str, value: Any) -> None:
    """Checks that a value is a string with at least one character."""
    string(place, value)
    if not value:
        raise invalid_value(f"'{place}' must not be empty", place)


def json_object(place: str, value: Any) -> None:
    """Checks that a value is an object."""
    if not isinstance(value, dict):
        raise invalid_type(place, "an object", value)


def array(low: int, high: int | None = None, element: Check | None = None) -> Check:
    """Returns the check of an array of `low` to `high` elements; None is no limit."""

    def check(place: str, value: Any) -> None:
        if type(value) is not list:
            raise invalid_type(place, "an array", value)
        if len(value) < low or (high is not None and len(value) > high):
            limits = f"{low} or more" if high is None else f"from {low} to {high}"
            raise invalid_value(f"'{place}' must have {limits} elements, got {len(value)}", place)
        if element is not None:
            for index, one in enumerate(value):
                element(f"{place}[{index}]", one)

    return check


def values(each: Check) -> Check:
    """Returns the check of an object with members of any name."""

    def check(place: str, value: Any) -> None:
        json_object(place, value)
        for name, one in value.items():
            each(f"{place}.{name[:80]}", one)

    return check


class Optional(NamedTuple):
    """The check of a member that may be absent or null."""

    check: Check


def members(**checks: Check | Optional) -> Check:
    """Returns the check of an object; members that are not named here pass as they are."""

    known = [
        (name, one.check, False) if isinstance(one, Optional) else (name, one, True)
        for name, one in checks.items()
    ]

    def check(place: str, value: Any) -> None:
        json_object(place, value)
        for name, one, required in known:
            member = value.get(name)
            if member is not None:
                one(f"{place}.{name}", member)
            elif required:
                raise missing_field(f"{place}.{name}")

    return check


def either_text(
    what: str, other: type, text: Check = anything, check_other: Check = anything
) -> Check:
    """Returns the check of a string, or of another JSON type; `what` names both."""

    def check(place: str, value: Any) -> None:
        if type(value) is str:
            text(place, value)
        elif isinstance(value, other):
            check_other(place, value)
        else:
            raise invalid_type(place, what, value)

    return check


def matching(pattern: str, complaint: str) -> Check:
    """Returns the check of a string that matches; `complaint` may show it as `{}`."""
    compiled = re.compile(pattern)

    def check(place: str, value: Any) -> None:
        string(place, value)
        if not compiled.fullmatch(value):
            raise invalid_value(f"'{place}' must {complaint.format(value[:80])}", place)

    return check


# Messages


_TOOL_NAME = matching(
    "[a-zA-Z0-9_-]{1,64}", "have 1 to 64 characters of a-z, A-Z, 0-9, '_' and '-'"
)
_FUNCTION_TYPE = one_of(("function",))


def _call_id(place: str, value: Any) -> None:
    if type(value) not in (str, int):  # TGI has written numbers
        raise invalid_type(place, "a string", value)


_CALLED_FUNCTION = members(
    name=string,
    # JSON text; TGI and Ollama write the object itself.
    arguments=Optional(either_text("a string or an object", dict)),
)
_CALLED_TOOL = members(
    id=Optional(_call_id), type=Optional(_FUNCTION_TYPE), function=_CALLED_FUNCTION
)


_IMAGE_URL = members(url=string, detail=Optional(string))


def _image_url(place: str, value: Any) -> None:
    _IMAGE_URL(place, value)
    if not value["url"].startswith("data:image/"):
        raise invalid_value(
            "images must be sent along, as data:image/...;base64,...: this server fetches nothing",
            f"{place}.url",
        )


_PARTS: dict[str, Check] = {
    "text": members(text=string),
    "refusal": members(refusal=string),
    "image_url": members(image_url=_image_url),
    "input_audio": members(input_audio=members(data=string, format=one_of(("wav", "mp3")))),
    "file": members(file=json_object),
}
"""The parts of a message by their types."""
_PART = members(type=one_of(tuple(_PARTS)))


def _part(place: str, value: Any) -> None:
    _PART(place, value)
    _PARTS[value["type"]](place, value)


_CONTENT = either_text("a string or an array", list, check_other=array(1, None, _part))
_MAY_LACK_CONTENT = ("assistant", "tool", "function")
_ROLE = members(role=one_of(("developer", "system", "user", *_MAY_LACK_CONTENT)))
_ANSWER_OF_TOOL = members(tool_call_id=_call_id)
_MAY_HAVE_CALL_ID = members(tool_call_id=Optional(_call_id))
_MESSAGE = members(
    name=Optional(string),
    refusal=Optional(string),
    tool_calls=Optional(array(0, None, _CALLED_TOOL)),
    audio=Optional(json_object),
)
_CALLS_FUNCTION = members(function_call=_CALLED_FUNCTION)
_WITH_CONTENT = members(content=_CONTENT)
_MAY_HAVE_CONTENT = members(content=Optional(_CONTENT))


def _message(place: str, value: Any) -> None:
    """Checks a message, with what other servers write: null and empty members count as absent."""
    _ROLE(place, value)
    role = value["role"]
    if role == "tool":  # Ollama writes the name of the tool instead, under two names
        named = value.get("tool_name") is not None or value.get("name") is not None
        (_MAY_HAVE_CALL_ID if named else _ANSWER_OF_TOOL)(place, value)
    _MESSAGE(place, value)
    if value.get("function_call") not in (None, {}):
        _CALLS_FUNCTION(place, value)
    if role not in _MAY_LACK_CONTENT:
        _WITH_CONTENT(place, value)
    elif value.get("content") != []:
        _MAY_HAVE_CONTENT(place, value)


messages = array(1, None, _message)

_TOOLS_FUNCTION = members(
    name=_TOOL_NAME,
    description=Optional(string),
    parameters=Optional(json_object),
    strict=Optional(boolean),
)
tools = array(1, 128, members(type=_FUNCTION_TYPE, function=_TOOLS_FUNCTION))
tool_choice = either_text(
    "a string or an object",
    dict,
    one_of(("none", "auto", "required")),
    members(type=_FUNCTION_TYPE, function=members(name=_TOOL_NAME)),
)


_FORMAT = members(type=one_of(("text", "json_object", "json_schema")))
_SCHEMA_FORMAT = members(
    json_schema=members(
        name=_TOOL_NAME,
        schema=Optional(json_object),
        strict=Optional(boolean),
        description=Optional(string),
    )
)


def response_format(place: str, value: Any) -> None:
    """Checks the format of the text of an answer, and the form of a schema."""
    _FORMAT(place, value)
    if value["type"] == "json_schema":
        _SCHEMA_FORMAT(place, value)


# Other fields

stop = either_text(
    "a string or an array of strings", list, not_empty_string, array(1, 16, not_empty_string)
)
stream_options = members(include_usage=Optional(boolean), include_obfuscation=Optional(boolean))
image_size = matching(
    "auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", "be auto, or look like 1024x1024; got '{}'"
)


def texts(high: int, text: Check) -> Check:
    """Returns the check of a text, an array of texts, an array of token ids, or one of such arrays.

    `high`: the maximum number of texts, or of arrays of token ids. `text`: the check of a text.
    """
    token_ids = array(1, None, integer(0, (1 << 63) - 1))

    def check_array(place: str, value: Any) -> None:
        if value and type(value[0]) is int:
            token_ids(place, value)
        else:
            is_text = bool(value) and type(value[0]) is str
            array(1, high, text if is_text else token_ids)(place, value)

    return either_text("a string or an array", list, text, check_array)


def sound(place: str, value: Any) -> None:
    """Checks a file that a form has sent."""
    if type(value) is not bytes:
        raise invalid_type(place, "a file", value)
    if not value:
        raise invalid_value(f"'{place}' must not be empty", place)

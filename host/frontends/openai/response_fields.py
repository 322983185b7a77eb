"""Converts the fields of `POST /v1/responses` to those of a chat.

The fields are in docs/reference/openai.md, Responses. The server keeps no responses, so fields that
refer to stored ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.frontends.openai.checks import (
    Check,
    array,
    boolean,
    either_text,
    integer,
    json_object,
    string,
)
from host.frontends.openai.fields import CHAT, KNOWN_FIELDS, Fields
from host.frontends.openai.openai_errors import (
    OpenAIError,
    invalid_value,
    missing_field,
    unsupported_field,
)

RESPONSES = "responses"

_NEED_A_STORE = ("previous_response_id", "conversation", "prompt")
_CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "functions": "tools",
    "function_call": "tool_choice",
}
"""Fields of a chat, and the fields of a response that replace them."""

_WITHOUT_EFFECT = frozenset(
    "input instructions max_output_tokens text reasoning store include truncation background"
    " max_tool_calls stream_options".split()
)
"""Fields that a chat does not get by their name."""

_LEFT_OUT = frozenset(
    "reasoning web_search_call file_search_call code_interpreter_call mcp_list_tools"
    " mcp_call".split()
)
"""Items of earlier turns that no model sees: reasoning, and what their server called itself."""

_ROLES = ("user", "assistant", "system", "developer")
_LOGPROBS = "message.output_text.logprobs"
_TEXT_OR_ARRAY = either_text("a string or an array", list)
_TEXT_OR_OBJECT = either_text("a string or an object", dict)

KNOWN_RESPONSE_FIELDS = (
    KNOWN_FIELDS[CHAT] | _WITHOUT_EFFECT | set(_CHAT_NAMES) | set(_NEED_A_STORE) | {"n", "logprobs"}
)
"""The fields of a response that OpenAI has, and those of a chat."""


def chat_fields(sent: Fields) -> Fields:
    """Returns the fields of the chat that makes a response. Raises OpenAIError.

    Only what differs from a chat is checked here.
    """
    for name in _NEED_A_STORE:
        if name in sent:
            raise unsupported_field(f"'{name}' is not supported: this server stores nothing", name)
    for name, replacement in _CHAT_NAMES.items():
        if name in sent:
            raise unsupported_field(f"'{name}' is not supported; use '{replacement}'", name)
    for name in ("n", "logprobs"):
        if name in sent:
            raise unsupported_field(f"'{name}' is not supported for responses", name)
    if _member(sent, "background", boolean):
        raise unsupported_field(
            "'background' is not supported: this server stores nothing", "background"
        )
    fields = {name: value for name, value in sent.items() if name not in _WITHOUT_EFFECT}
    if "top_logprobs" in sent or _LOGPROBS in (_member(sent, "include", array(0)) or ()):
        fields["logprobs"] = True
    limit = _member(sent, "max_output_tokens", integer(1))
    if limit is not None:
        fields["max_completion_tokens"] = limit
    fields["messages"] = _messages(sent)
    if "tools" in sent:
        tools = _tools(sent)
        fields.pop("tools")
        if tools:
            fields["tools"] = tools
    choice = _member(sent, "tool_choice", _TEXT_OR_OBJECT)
    if isinstance(choice, dict):
        fields["tool_choice"] = _tool_choice(choice)
    elif choice is not None and "tools" not in fields and choice != "required":
        fields.pop("tool_choice")  # clients send "auto" without tools
    _add_text(fields, _member(sent, "text", json_object) or {})
    effort = _member(_member(sent, "reasoning", json_object) or {}, "effort", string)
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def _messages(sent: Fields) -> list[Fields]:
    messages: list[Fields] = []
    instructions = _member(sent, "instructions", string)
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    items = _member(sent, "input", _TEXT_OR_ARRAY, required=True)
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for index, item in enumerate(items):
        place = f"input[{index}]"
        json_object(place, item)
        _add_item(messages, place, item)
    if not messages:
        raise invalid_value("'input' must have 1 or more elements, got 0", "input")
    return messages


def _add_item(messages: list[Fields], place: str, item: Fields) -> None:
    """Adds an item of `input` to the messages."""
    match _member(item, "type", string, place) or "message":
        case "message":
            role = _member(item, "role", string, place, required=True)
            if role not in _ROLES:
                names = ", ".join(f"'{name}'" for name in _ROLES)
                raise invalid_value(f"'{place}.role' must be one of {names}", f"{place}.role")
            content = _member(item, "content", _TEXT_OR_ARRAY, place, required=role != "assistant")
            if role == "assistant" and not content:  # cut off before its first token
                messages.append({"role": role, "content": ""})
            else:
                messages.append({"role": role, "content": _content(content, f"{place}.content")})
        case "function_call":
            call = {
                "id": _member(item, "call_id", string, place, required=True),
                "type": "function",
                "function": {
                    "name": _member(item, "name", string, place, required=True),
                    "arguments": _member(item, "arguments", string, place) or "",
                },
            }
            if messages and messages[-1]["role"] == "assistant":  # one turn of the assistant
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            output = _member(item, "output", _TEXT_OR_ARRAY, place) or ""
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _member(item, "call_id", string, place, required=True),
                    "content": _content(output, f"{place}.output"),
                }
            )
        case kind if kind in _LEFT_OUT:
            pass
        case "item_reference":
            inner = f"{place}.type"
            raise unsupported_field(
                f"'{inner}' is not supported: 'item_reference': this server stores nothing", inner
            )
        case other:
            raise _not_supported(f"{place}.type", other)


def _content(value: Any, place: str) -> Any:
    """Returns the content of a message: a text, or the parts of a chat."""
    if isinstance(value, str):
        return value
    if not value:
        raise invalid_value(f"'{place}' must have 1 or more elements, got 0", place)
    parts = []
    for index, part in enumerate(value):
        inner = f"{place}[{index}]"
        json_object(inner, part)
        match _member(part, "type", string, inner, required=True):
            case "input_text" | "output_text":
                text = _member(part, "text", string, inner, required=True)
                parts.append({"type": "text", "text": text})
            case "refusal":
                text = _member(part, "refusal", string, inner, required=True)
                parts.append({"type": "refusal", "refusal": text})
            case "input_image":
                if part.get("file_id") is not None:
                    raise _not_supported(f"{inner}.file_id", "file_id")
                image = {"url": _member(part, "image_url", string, inner, required=True)}
                detail = _member(part, "detail", string, inner)
                if detail is not None:
                    image["detail"] = detail
                parts.append({"type": "image_url", "image_url": image})
            case other:
                raise _not_supported(f"{inner}.type", other)
    if all(part["type"] == "text" for part in parts) and len(parts) == 1:
        return parts[0]["text"]
    return parts


def _tools(sent: Fields) -> list[Fields]:
    """Returns the tools of a chat, whose functions are members of their own."""
    tools = []
    for index, tool in enumerate(_member(sent, "tools", array(0))):
        place = f"tools[{index}]"
        json_object(place, tool)
        kind = _member(tool, "type", string, place, required=True)
        if kind != "function":
            raise _not_supported(f"{place}.type", kind)
        _member(tool, "name", string, place, required=True)
        function = {
            name: tool[name]
            for name in ("name", "description", "parameters", "strict")
            if tool.get(name) is not None
        }
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: Fields) -> Fields:
    kind = _member(choice, "type", string, "tool_choice", required=True)
    if kind != "function":
        raise _not_supported("tool_choice.type", kind)
    name = _member(choice, "name", string, "tool_choice", required=True)
    return {"type": "function", "function": {"name": name}}


def _add_text(fields: Fields, text: Fields) -> None:
    """Adds the members of the field `text`."""
    verbosity = _member(text, "verbosity", string, "text")
    if verbosity is not None:
        fields["verbosity"] = verbosity
    form = _member(text, "format", json_object, "text")
    if form is None:
        return
    kind = _member(form, "type", string, "text.format", required=True)
    if kind == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        _member(form, "name", string, "text.format", required=True)
        _member(form, "schema", json_object, "text.format", required=True)
        fields["response_format"] = {"type": kind, "json_schema": schema}
    else:
        fields["response_format"] = {"type": kind}


def _member(
    owner: Mapping[str, Any], name: str, check: Check, place: str = "", required: bool = False
) -> Any:
    """Returns a member of an object at a place of the body; None if it is absent."""
    value = owner.get(name)
    inner = f"{place}.{name}" if place else name
    if value is not None:
        check(inner, value)
    elif required:
        raise missing_field(inner)
    return value


def _not_supported(place: str, value: str) -> OpenAIError:
    return unsupported_field(f"'{place}' is not supported: '{value[:80]}'", place)

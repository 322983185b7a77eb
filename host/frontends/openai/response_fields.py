"""Converts the fields of `POST /v1/responses` to those of a chat.

The fields are in docs/reference/openai.md, Responses. The server keeps no responses, so fields that
refer to stored ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.frontends.openai.checks import (
    Check,
    Optional,
    array,
    boolean,
    either_text,
    integer,
    json_object,
    members,
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
_ITEM = members(type=Optional(string))
_MESSAGE = members(role=string, content=Optional(_TEXT_OR_ARRAY))
_FUNCTION_CALL = members(call_id=string, name=string, arguments=Optional(string))
_FUNCTION_CALL_OUTPUT = members(output=Optional(_TEXT_OR_ARRAY), call_id=string)
_TYPED = members(type=string)
_NAMED = members(name=string)
_TEXT = members(verbosity=Optional(string), format=Optional(json_object))
_SCHEMA = members(name=string, schema=json_object)
_TEXT_PART = members(text=string)
_REFUSAL = members(refusal=string)
_IMAGE = members(image_url=string, detail=Optional(string))
_REASONING = members(effort=Optional(string))
_CHECKS: Mapping[str, Check] = {
    "background": boolean,
    "include": array(0),
    "max_output_tokens": integer(1),
    "instructions": string,
    "input": _TEXT_OR_ARRAY,
    "tools": array(0, None, lambda place, tool: _tool(place, tool)),
    "tool_choice": _TEXT_OR_OBJECT,
    "text": json_object,
    "reasoning": _REASONING,
}

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
    for name, check in _CHECKS.items():
        if name in sent:
            check(name, sent[name])
    if sent.get("background"):
        raise unsupported_field(
            "'background' is not supported: this server stores nothing", "background"
        )
    fields = {name: value for name, value in sent.items() if name not in _WITHOUT_EFFECT}
    if "top_logprobs" in sent or _LOGPROBS in sent.get("include", ()):
        fields["logprobs"] = True
    if "max_output_tokens" in sent:
        fields["max_completion_tokens"] = sent["max_output_tokens"]
    fields["messages"] = _messages(sent)
    if "tools" in sent:
        tools = _tools(sent)
        fields.pop("tools")
        if tools:
            fields["tools"] = tools
    choice = sent.get("tool_choice")
    if isinstance(choice, dict):
        _tool("tool_choice", choice)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice is not None and "tools" not in fields and choice != "required":
        fields.pop("tool_choice")  # clients send "auto" without tools
    _add_text(fields, sent.get("text", {}))
    effort = sent.get("reasoning", {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def _messages(sent: Fields) -> list[Fields]:
    messages: list[Fields] = []
    if "instructions" in sent:
        messages.append({"role": "system", "content": sent["instructions"]})
    if "input" not in sent:
        raise missing_field("input")
    items = sent["input"]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for index, item in enumerate(items):
        _add_item(messages, f"input[{index}]", item)
    if not messages:
        raise invalid_value("'input' must have 1 or more elements, got 0", "input")
    return messages


def _add_item(messages: list[Fields], place: str, item: Fields) -> None:
    """Adds an item of `input` to the messages."""
    _ITEM(place, item)
    match item.get("type") or "message":
        case "message":
            _MESSAGE(place, item)
            role, content = item["role"], item.get("content")
            if role not in _ROLES:
                names = ", ".join(f"'{name}'" for name in _ROLES)
                raise invalid_value(f"'{place}.role' must be one of {names}", f"{place}.role")
            if role == "assistant" and not content:  # cut off before its first token
                messages.append({"role": role, "content": ""})
                return
            if content is None:
                raise missing_field(f"{place}.content")
            messages.append({"role": role, "content": _content(content, f"{place}.content")})
        case "function_call":
            _FUNCTION_CALL(place, item)
            function = {"name": item["name"], "arguments": item.get("arguments") or ""}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":  # one turn of the assistant
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            _FUNCTION_CALL_OUTPUT(place, item)
            output = _content(item.get("output") or "", f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
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
    parts = [_part(part, f"{place}[{index}]") for index, part in enumerate(value)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _part(part: Any, place: str) -> Fields:
    """Returns a part of a message of a chat."""
    _TYPED(place, part)
    match part["type"]:
        case "input_text" | "output_text":
            _TEXT_PART(place, part)
            return {"type": "text", "text": part["text"]}
        case "refusal":
            _REFUSAL(place, part)
            return {"type": "refusal", "refusal": part["refusal"]}
        case "input_image":
            if part.get("file_id") is not None:
                raise _not_supported(f"{place}.file_id", "file_id")
            _IMAGE(place, part)
            image = {"url": part["image_url"]}
            if part.get("detail") is not None:
                image["detail"] = part["detail"]
            return {"type": "image_url", "image_url": image}
        case other:
            raise _not_supported(f"{place}.type", other)


def _tools(sent: Fields) -> list[Fields]:
    """Returns the tools of a chat, whose functions are members of their own."""
    names = ("name", "description", "parameters", "strict")
    return [
        {
            "type": "function",
            "function": {name: tool[name] for name in names if tool.get(name) is not None},
        }
        for tool in sent["tools"]
    ]


def _tool(place: str, tool: Any) -> None:
    """Checks a tool, or the choice of one."""
    _TYPED(place, tool)
    if tool["type"] != "function":
        raise _not_supported(f"{place}.type", tool["type"])
    _NAMED(place, tool)


def _add_text(fields: Fields, text: Fields) -> None:
    """Adds the members of the field `text`."""
    _TEXT("text", text)
    if text.get("verbosity") is not None:
        fields["verbosity"] = text["verbosity"]
    form = text.get("format")
    if form is None:
        return
    _TYPED("text.format", form)
    if form["type"] == "json_schema":
        _SCHEMA("text.format", form)
        schema = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        fields["response_format"] = {"type": form["type"]}


def _not_supported(place: str, value: str) -> OpenAIError:
    return unsupported_field(f"'{place}' is not supported: '{value[:80]}'", place)

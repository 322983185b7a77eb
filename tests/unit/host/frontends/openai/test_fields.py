"""The checks of the fields of OpenAI requests: one row for each rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from host.frontends.openai.fields import CHAT, COMPLETIONS, EMBEDDINGS, check_fields, parse_object
from host.frontends.openai.openai_errors import OpenAIError

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT_BODY = {"model": "m", "messages": [USER]}


def message(**members: Any) -> dict[str, Any]:
    return {"messages": [{**USER, **members}]}


def fail(body: bytes, route: str) -> OpenAIError:
    with pytest.raises(OpenAIError) as caught:
        check_fields(parse_object(body), route)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"messages": None}, "missing_field", "'messages' is missing"),
        ({"messages": []}, "invalid_value", "'messages' must have 1 or more elements, got 0"),
        ({"messages": "hi"}, "invalid_type", "'messages' must be an array, got a string"),
        ({"messages": [1]}, "invalid_type", "'messages[0]' must be an object, got a number"),
        ({"messages": [{"content": "a"}]}, "missing_field", "'messages[0].role' is missing"),
        (
            message(role="boss"),
            "invalid_value",
            (
                "'messages[0].role' must be one of 'developer', 'system', 'user', 'assistant',"
                " 'tool', 'function'; got 'boss'"
            ),
        ),
        (message(content=None), "missing_field", "'messages[0].content' is missing"),
        (message(role="tool"), "missing_field", "'messages[0].tool_call_id' is missing"),
        (
            message(content=[{"type": 1}]),
            "invalid_type",
            "'messages[0].content[0].type' must be a string, got a number",
        ),
        (
            message(content=[{"type": "text", "text": True}]),
            "invalid_type",
            "'messages[0].content[0].text' must be a string, got a boolean",
        ),
        (
            message(content=[{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]),
            "invalid_value",
            "images must be sent along, as data:image/...;base64,...: this server fetches nothing",
        ),
        (
            {"temperature": "hot"},
            "invalid_type",
            "'temperature' must be a number, got a string",
        ),
        ({"temperature": True}, "invalid_type", "'temperature' must be a number, got a boolean"),
        ({"top_p": 3}, "invalid_value", "'top_p' must be from 0 to 1, got 3"),
        ({"n": 0}, "invalid_value", "'n' must be from 1 to 128, got 0"),
        ({"max_tokens": 0}, "invalid_value", "'max_tokens' must be 1 or more, got 0"),
        ({"max_tokens": 1.5}, "invalid_type", "'max_tokens' must be an integer, got a number"),
        ({"stop": ["a", ""]}, "invalid_value", "'stop[1]' must not be empty"),
        (
            {"stop": 1},
            "invalid_type",
            "'stop' must be a string or an array of strings, got a number",
        ),
        ({"logit_bias": {"5": 200}}, "invalid_value", None),
        ({"metadata": {"a": []}}, "invalid_type", "'metadata.a' must be a string, got an array"),
        ({"stream_options": {}}, "invalid_value", "'stream_options' needs 'stream': true"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "invalid_type",
            "'stream_options.include_usage' must be a boolean, got a number",
        ),
        ({"top_logprobs": 2}, "invalid_value", "'top_logprobs' needs 'logprobs': true"),
        ({"tool_choice": "auto"}, "invalid_value", "'tool_choice' needs 'tools'"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "missing_field",
            "'tools[0].function.name' is missing",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "invalid_value",
            "'tool_choice' names 'g', which is not in 'tools'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "missing_field",
            "'response_format.json_schema' is missing",
        ),
        ({"functions": []}, "invalid_value", "'functions' is not supported; use 'tools'"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(
    fields: dict[str, Any], code: str, text: str | None
) -> None:
    error = fail(json.dumps({**CHAT_BODY, **fields}).encode(), CHAT)
    assert (error.status, error.kind, error.error_code) == (400, "invalid_request_error", code)
    assert text is None or error.message == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": 1}, "'prompt' must be a string or an array, got a number"),
        ({"prompt": []}, "'prompt' must have from 1 to 128 elements, got 0"),
        ({"prompt": ["a", 1]}, "'prompt[1]' must be a string, got a number"),
        ({"prompt": [1, "a"]}, "'prompt[1]' must be an integer, got a string"),
        ({"prompt": [[-1]]}, None),
        ({"best_of": 2}, "'best_of' must be 1"),
        ({"max_tokens": 0}, "'max_tokens' of 0 needs 'echo': true"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], text: str | None) -> None:
    error = fail(json.dumps({"model": "m", "prompt": "a", **fields}).encode(), COMPLETIONS)
    assert error.status == 400
    assert text is None or error.message == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "the body is not JSON: "),
        (b"[]", "the body is not a JSON object"),
        (b'{"model": "\xff"}', "the body is not JSON: byte 11 is not valid UTF-8"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, text: str) -> None:
    error = fail(body, CHAT)
    assert error.message.startswith(text) and error.error_code == "invalid_json"


def test_null_is_absence_and_the_first_of_equal_names_counts() -> None:
    body = b'{"model": "a", "model": "b", "prompt": "p", "n": null, "top_k": 5}'
    assert check_fields(parse_object(body), COMPLETIONS) == {
        "model": "a",
        "prompt": "p",
        "top_k": 5,
    }


def test_an_assistant_with_tool_calls_needs_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fields = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert check_fields({"model": "m", **fields}, CHAT)["messages"]


def test_texts_to_embed_are_not_empty() -> None:
    assert fail(b'{"model": "m", "input": ["a", ""]}', EMBEDDINGS).message == (
        "'input[1]' must not be empty"
    )


def test_defaults_are_those_of_the_route_and_give_way_to_what_was_sent() -> None:
    defaults = {"temperature": 1, "dimensions": 3, "top_k": 2, "max_completion_tokens": 9}
    body = b'{"model": "m", "prompt": "a", "temperature": 2}'
    fields = check_fields(parse_object(body), COMPLETIONS, defaults)
    assert fields == {"model": "m", "prompt": "a", "temperature": 2, "top_k": 2}
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
    fields = check_fields(parse_object(body), CHAT, defaults)
    assert "max_completion_tokens" not in fields and fields["max_tokens"] == 1

"""Histories of chats that other servers have written, sent back to `/v1` of a real host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import RepositoryBuilder, RunningHost, Serve
from tests.openai_models import WHOLE, WHOLE_CONFIG, Reply, send

# As templates of Llama and Qwen do: a message with `tool_calls` must have one call, whose
# arguments are an object.
TEMPLATE = """
{%- for message in messages %}
{%- if 'tool_calls' in message and message.tool_calls | length != 1 %}
{{- raise_exception("one call, please") }}
{%- endif %}
{{- message.role }}:
{%- if message.reasoning_content is string %} <{{ message.reasoning_content }}>{% endif %}
{%- if message.content %} {{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
{%- set arguments = call.function.arguments %} {{ call.type }} {{ call.function.name }}(
{%- for name, value in arguments.items() %}{{ name }}={{ value }}{% endfor %})
{%- endfor %}
{%- if message.tool_call_id is string %} for {{ message.tool_call_id }}{% endif %};
{%- endfor %}
"""


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder) -> RunningHost:
    echo = WHOLE.replace(".upper()", "")
    module_repository.add("echo", echo, WHOLE_CONFIG, files={"chat_template.jinja": TEMPLATE})
    plain = WHOLE_CONFIG + (
        'parameters { key: "OPENAI" value { string_value: "chat" } }'
        'parameters { key: "OPENAI_CHAT_TEMPLATE" value { string_value: "plain" } }'
    )
    module_repository.add("plain", echo, plain)
    return module_serve(module_repository).wait_started()


def send_history(host: RunningHost, *messages: dict[str, Any], model: str = "echo") -> Reply:
    """Asks for a chat that continues after these messages."""
    asked, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    body = {"model": model, "messages": [asked, *messages, more]}
    return send(host, "POST", "/v1/chat/completions", body)


def assistant(**members: Any) -> dict[str, Any]:
    return {"role": "assistant", **members}


CALL = {"name": "f", "arguments": '{"x": 1}'}
CALLS = [{"id": "call_1", "type": "function", "function": CALL}]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "r"}
EMPTY = {"refusal": None, "annotations": None, "audio": None, "function_call": None}
"""What vLLM and the client of OpenAI write for each message."""

ASKED = "assistant: function f(x=1);tool: r for call_1;"
HISTORIES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "OpenAI: text": ([assistant(content="t", refusal=None, annotations=[])], "assistant: t;"),
    "OpenAI's client: text": (
        [assistant(content="t", **{**EMPTY, "annotations": []}, tool_calls=None)],
        "assistant: t;",
    ),
    "OpenAI: refusal": (
        [assistant(content=None, refusal="no", annotations=[])],
        "assistant: no;",
    ),
    "OpenAI: call": ([assistant(content=None, refusal=None, tool_calls=CALLS), RESULT], ASKED),
    "OpenAI: function call": (
        [assistant(content=None, function_call=CALL), {**RESULT, "role": "function", "name": "f"}],
        ASKED.replace("tool:", "function:"),
    ),
    "OpenAI: sound": (
        [
            assistant(
                content=None,
                refusal=None,
                audio={"id": "audio_1", "expires_at": 1, "data": "AA==", "transcript": "said"},
            )
        ],
        "assistant: said;",
    ),
    "OpenAI: parts": (
        [assistant(content=[{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "no"}])],
        "assistant: t\nno;",
    ),
    "OpenAI: nothing": ([assistant(content=None, refusal=None)], "assistant:;"),
    "OpenAI: no parts": ([assistant(content=[])], "assistant:;"),
    "vLLM: text": (
        [assistant(content="t", **EMPTY, tool_calls=[], reasoning=None)],
        "assistant: t;",
    ),
    "vLLM: call": ([assistant(content=None, **EMPTY, tool_calls=CALLS), RESULT], ASKED),
    "vLLM: cut reasoning": (
        [assistant(content=None, **EMPTY, tool_calls=[], reasoning_content="hm")],
        "assistant: <hm>;",
    ),
    "vLLM: reasoning": (
        [assistant(content="t", **EMPTY, tool_calls=[], reasoning="hm", reasoning_content=None)],
        "assistant: <hm> t;",
    ),
    "SGLang: text": (
        [assistant(content="t", reasoning_content=None, tool_calls=None)],
        "assistant: t;",
    ),
    "SGLang: call": (
        [
            assistant(content="", reasoning_content=None, tool_calls=[{**CALLS[0], "index": 0}]),
            RESULT,
        ],
        ASKED,
    ),
    "llama.cpp: text": ([assistant(content="t")], "assistant: t;"),
    "llama.cpp: reasoning": (
        [assistant(reasoning_content="hm", content="t")],
        "assistant: <hm> t;",
    ),
    "llama.cpp: call without id": (
        [assistant(content=None, tool_calls=[{**CALLS[0], "id": ""}]), RESULT],
        ASKED,
    ),
    "llama.cpp: call without arguments": (
        [assistant(tool_calls=[{**CALLS[0], "function": {"name": "f", "arguments": ""}}]), RESULT],
        ASKED.replace("x=1", ""),
    ),
    "TGI: text": ([assistant(content="t", tool_call_id=None, tool_calls=None)], "assistant: t;"),
    "TGI: call": (
        [
            assistant(
                tool_calls=[
                    {
                        "id": "0",
                        "type": "function",
                        "function": {"description": None, "name": "f", "arguments": {"x": 1}},
                    }
                ]
            ),
            RESULT,
        ],
        ASKED,
    ),
    "TGI 1: call": (
        [
            assistant(
                content=None,
                name=None,
                tool_calls=[{"id": 0, "type": "function", "function": {**CALL, "arguments": {}}}],
            ),
            {**RESULT, "tool_call_id": 0},
        ],
        "assistant: function f();tool: r for 0;",
    ),
    "Ollama: call": (
        [assistant(content="", reasoning="hm", tool_calls=[{**CALLS[0], "index": 0}]), RESULT],
        ASKED.replace(": function", ": <hm> function"),
    ),
    "Ollama's own API: call": (
        [
            assistant(
                content="",
                thinking="hm",
                images=None,
                tool_calls=[{"function": {"index": 0, "name": "f", "arguments": {"x": 1}}}],
            ),
            {"role": "tool", "tool_name": "f", "content": "r"},
        ],
        "assistant: <hm> function f(x=1);tool: r;",
    ),
    "Ollama's own API, in 2024": (
        [
            assistant(content="", tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}]),
            {"role": "tool", "name": "f", "content": "r"},
        ],
        "assistant: function f(x=1);tool: r;",
    ),
    "an empty function call": ([assistant(content="t", function_call={})], "assistant: t;"),
    "a tool that gave nothing": (
        [assistant(tool_calls=CALLS), {**RESULT, "content": None}],
        ASKED.replace(": r", ":"),
    ),
}
"""Messages of other servers, and how the template writes them."""


@pytest.mark.parametrize("case", HISTORIES)
def test_histories_of_other_servers_are_rendered(host: RunningHost, case: str) -> None:
    messages, rendered = HISTORIES[case]
    reply = send_history(host, *messages)
    assert reply.status == 200, reply.body
    text = reply.json["choices"][0]["message"]["content"]
    assert text == f"user: a;{rendered}user: b;"


def test_built_in_templates_write_refusals_and_transcripts(host: RunningHost) -> None:
    said = {"id": "audio_1", "transcript": "said"}
    reply = send_history(
        host, assistant(content=None, refusal="no"), assistant(audio=said), model="plain"
    )
    assert reply.json["choices"][0]["message"]["content"] == (
        "user: a\nassistant: no\nassistant: said\nuser: b\nassistant:"
    )


@pytest.mark.parametrize("model", ["echo", "plain"])
@pytest.mark.parametrize(
    ("message", "param", "reason"),
    [
        (
            assistant(audio={"id": "audio_1"}),
            "messages[1].audio",
            "has no 'transcript': this server stores no sounds",
        ),
        (
            assistant(
                tool_calls=[
                    {"id": "c", "type": "custom", "custom": {"name": "f", "input": "free text"}}
                ]
            ),
            "messages[1].tool_calls[0].type",
            "must be one of 'function'; got 'custom'",
        ),
        (
            {"role": "user", "content": []},
            "messages[1].content",
            "must have 1 or more elements, got 0",
        ),
        (
            assistant(function_call={"arguments": "{}"}),
            "messages[1].function_call.name",
            "is missing",
        ),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_with_the_reason(
    host: RunningHost, model: str, message: dict[str, Any], param: str, reason: str
) -> None:
    reply = send_history(host, message, model=model)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert reply.error["message"].endswith(reason)


def text_item(**members: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": "t", "annotations": [], "logprobs": []}
    return {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
        **members,
    }


CALL_ITEM = {
    "id": "fc_1",
    "type": "function_call",
    "status": "completed",
    "call_id": "call_1",
    "name": "f",
    "arguments": '{"x": 1}',
}
RESULT_ITEM = {"type": "function_call_output", "call_id": "call_1", "output": "r"}
ITEMS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([text_item(phase="final_answer")], "assistant: t;"),
    "nothing": ([text_item(content=[], status="incomplete")], "assistant:;"),
    "null": ([text_item(content=None)], "assistant:;"),
    "refusal": ([text_item(content=[{"type": "refusal", "refusal": "no"}])], "assistant: no;"),
    "call": ([CALL_ITEM, RESULT_ITEM], ASKED),
    "call without arguments": (
        [{**CALL_ITEM, "arguments": ""}, {**RESULT_ITEM, "output": []}],
        ASKED.replace("x=1", "").replace(": r", ":"),
    ),
    "OpenAI: reasoning": (
        [
            {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "AA=="},
            text_item(),
        ],
        "assistant: t;",
    ),
    "llama.cpp: reasoning": (
        [
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": "",
                "status": "completed",
            },
            text_item(),
        ],
        "assistant: t;",
    ),
    "calls of the server that wrote it": (
        [
            {
                "id": "ws_1",
                "type": "web_search_call",
                "status": "completed",
                "action": {"type": "search", "query": "q"},
            },
            {"id": "fs_1", "type": "file_search_call", "queries": ["q"], "results": None},
            {"id": "ci_1", "type": "code_interpreter_call", "code": "1", "outputs": None},
            {"id": "mcpl_1", "type": "mcp_list_tools", "server_label": "s", "tools": []},
            {"id": "mcp_1", "type": "mcp_call", "name": "f", "arguments": "{}", "output": "r"},
            text_item(),
        ],
        "assistant: t;",
    ),
}
"""Items of responses that other servers have written, and how the template writes them."""


@pytest.mark.parametrize("case", ITEMS)
def test_items_of_other_servers_are_rendered(host: RunningHost, case: str) -> None:
    items, rendered = ITEMS[case]
    asked, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    body = {"model": "echo", "input": [asked, *items, more]}
    reply = send(host, "POST", "/v1/responses", body)
    assert reply.status == 200, reply.body
    text = reply.json["output"][0]["content"][0]["text"]
    assert text == f"user: a;{rendered}user: b;"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "this server stores nothing"),
        ({"type": "compaction", "encrypted_content": "AA=="}, "'compaction'"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "free text"}, "call'"),
    ],
)
def test_items_that_cannot_be_rendered_are_refused_with_the_reason(
    host: RunningHost, item: dict[str, Any], reason: str
) -> None:
    reply = send(host, "POST", "/v1/responses", {"model": "echo", "input": [item]})
    assert (reply.status, reply.error["param"]) == (400, "input[0].type"), reply.body
    assert reply.error["message"].endswith(reason)

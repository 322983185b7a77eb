"""Requests whose values have wrong types, at any depth: they are refused, never a failure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from host.config.pbtxt import parse_pbtxt
from host.frontends.openai.answers import ResponseAnswer
from host.frontends.openai.contract import Contract
from host.frontends.openai.contract_compiler import compile_contract
from host.frontends.openai.field_support import prepare_fields
from host.frontends.openai.fields import CHAT, COMPLETIONS, EMBEDDINGS, check_fields
from host.frontends.openai.generation import build_generation
from host.frontends.openai.openai_errors import OpenAIError
from host.frontends.openai.response_fields import RESPONSES, chat_fields
from host.frontends.openai.template import render_built_in, template_message

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
FORMAT = {"name": "s", "schema": {"type": "object"}, "strict": True, "description": "d"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMMON: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "temperature": 1.0,
    "seed": 1,
    "stop": ["a", "b"],
    "n": 2,
    "user": "u",
    "top_k": 3,
    "priority": 0,
    "timeout": 1,
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    CHAT: {
        **COMMON,
        "messages": [
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"1": 1},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": FORMAT},
        "modalities": ["text"],
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"a": 1},
    },
    COMPLETIONS: {**COMMON, "prompt": ["a", "b"], "max_tokens": 5, "logprobs": 1, "suffix": "s"},
    EMBEDDINGS: {"model": "m", "input": ["a"], "dimensions": 2, "encoding_format": "float"},
    RESPONSES: {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "reasoning", "summary": []},
        ],
        "instructions": "i",
        "max_output_tokens": 5,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", **FORMAT}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "stream": True,
    },
}
WRONG: tuple[Any, ...] = (
    {"type": "text", "json_schema": 5},
    {"type": "json_object", "json_schema": {"schema": 5}},
    {"type": "function", "function": 5},
    None,
    True,
    -1,
    1 << 70,
    0.5,
    "",
    "x",
    [],
    [None],
    [[]],
    {},
    {"a": None},
)

TEXT = 'output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]'
LOGPROBS = '{ name: "logprobs" data_type: TYPE_STRING dims: [ 1 ] }'
CONFIGS = {
    "plain": 'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]' + TEXT,
    "vllm": """input [
        { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
    ] output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },"""
    + LOGPROBS
    + "]",
    "whole": 'input [{ name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] }]'
    + TEXT.replace("text_output", "openai_response"),
    "typed": """input [
        { name: "messages" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
        { name: "seed" data_type: TYPE_INT64 dims: [ 1 ] optional: true },
        { name: "stop" data_type: TYPE_STRING dims: [ -1 ] optional: true },
        { name: "tools" data_type: TYPE_STRING dims: [ 1 ] optional: true },
        { name: "tool_choice" data_type: TYPE_STRING dims: [ 1 ] optional: true },
        { name: "schema" data_type: TYPE_STRING dims: [ 1 ] optional: true },
        { name: "top_k" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "priority" data_type: TYPE_UINT8 dims: [ 1 ] optional: true },
        { name: "images" data_type: TYPE_STRING dims: [ -1 ] optional: true }
    ]"""
    + TEXT,
}


def contracts() -> Iterator[Contract]:
    for text in CONFIGS.values():
        yield compile_contract(parse_pbtxt(f'name: "m" {text}', "config.pbtxt"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside of a value."""
    members = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, member in members:
        yield (*path, key)
        yield from places(member, (*path, key))


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a path; None leaves out a top-level field."""
    copied = copy.deepcopy(document)
    owner: Any = copied
    for key in path[:-1]:
        owner = owner[key]
    if len(path) == 1 and value is None:
        del owner[path[0]]
    else:
        owner[path[-1]] = value
    return copied


def answer(contract: Contract, document: dict[str, Any], route: str) -> None:
    """Does what a handler does with a document before it asks the model."""
    if route == RESPONSES:
        sent, document, route = document, chat_fields(document), CHAT
        ResponseAnswer("m", sent)
    fields = check_fields(document, route)
    if route == EMBEDDINGS:
        return
    fields = prepare_fields(contract, fields, route)
    if route == CHAT:
        for index, message in enumerate(fields["messages"]):
            template_message(message, index, knows_developer=False)
        render_built_in("chatml", fields["messages"])
    build_generation(contract, fields, route, ["prompt"], -1, "id", None)


def supported(contract: Contract, document: dict[str, Any], route: str) -> dict[str, Any]:
    """A document without the fields that the model does not take."""
    document = dict(document)
    while True:
        try:
            answer(contract, document, route)
        except OpenAIError as error:
            assert error.error_code == "unsupported_field" and error.param is not None, error
            for name in FIELDS_OF.get(error.param, (error.param,)):
                document.pop(name, None)
        else:
            return document


FIELDS_OF = {
    "logprobs": ("logprobs", "top_logprobs"),
    "tools": ("tools", "tool_choice"),
    "response_format": ("response_format", "text"),
}


@pytest.mark.parametrize("route", DOCUMENTS)
def test_a_value_of_a_wrong_type_at_any_depth_is_answered_or_refused(route: str) -> None:
    refused = 0
    for contract in contracts():
        right = supported(contract, DOCUMENTS[route], route)
        for path in places(right):
            for value in WRONG:
                document = changed(right, path, value)
                try:
                    answer(contract, document, route)
                except OpenAIError as error:
                    assert error.status == 400 and error.error_code, (path, value)
                    error.body()
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{route}: {value!r} at {path}") from error
    assert refused > 100

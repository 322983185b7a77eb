"""Tool calls: which of them a request allows or demands, and those in the text of a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.frontends.openai.tool_calls import ForcedCall, ToolParser, make_parser

Calls = list[tuple[str, str]]
A = ("f", '{"a": "}\\"{"}')
B = ("g", "{}")
TEXTS: list[tuple[str, str, str, Calls]] = [
    ("hermes", "no call < here <tool", "no call < here <tool", []),
    (
        "hermes",
        (
            'I look. <tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n'
        ),
        "I look. ",
        [A, B],
    ),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}', "", [B]),
    ("hermes", '<tool_call>{"name": "g", "arg', '<tool_call>{"name": "g", "arg', []),
    ("hermes", "<tool_call>none</tool_call> x", "<tool_call>none</tool_call> x", []),
    ("hermes", '<tool_call>{"a": {}}</tool_call>', '<tool_call>{"a": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "g"}</tool_call> so be it', "so be it", [B]),
    ("llama3", "plain {text}", "plain {text}", []),
    ("llama3", '{"name": "f", "parameters": {"a": "}\\"{"}}', "", [A]),
    ("llama3", '<|python_tag|>{"name": "g", "parameters": {}}', "", [B]),
    (
        "llama3",
        '{"name": "f", "parameters": {"a": "}\\"{"}}; {"name": "g", "parameters": {}}',
        "",
        [A, B],
    ),
    ("llama3", '{"answer": 1}', '{"answer": 1}', []),
    ("llama3", '{"name": "g"', '{"name": "g"', []),
    ("llama3", "<|python", "<|python", []),
    ("mistral", "[TOOL] text [", "[TOOL] text [", []),
    (
        "mistral",
        'ok[TOOL_CALLS][{"name": "f", "arguments": {"a": "}\\"{"}}, {"name": "g"}]',
        "ok",
        [A, B],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": "}\\"{"}[TOOL_CALLS]g[ARGS]{}', "", [A, B]),
    ("mistral", "[TOOL_CALLS] (none)", "[TOOL_CALLS] (none)", []),
    ("mistral", '[TOOL_CALLS][{"a": 1}]', '[TOOL_CALLS][{"a": 1}]', []),
]


def parse(parser: ToolParser, pieces: list[str]) -> tuple[str, Calls]:
    content, calls = "", []
    for message in [*map(parser.feed, pieces), parser.finish()]:
        content += message.get("content", "")
        calls += message.get("tool_calls", [])
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    assert parser.found == bool(calls)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS)
def test_calls_are_parsed_from_a_text(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(make_parser(name), [text]) == (content, calls)
    assert parse(make_parser(name), list(text)) == (content, calls)


@settings(deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=6))
def test_calls_are_equal_for_every_split(row: tuple[str, str, str, Calls], cuts: list[int]) -> None:
    name, text, content, calls = row
    assert parse(make_parser(name), split(text, cuts)) == (content, calls)


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(["hermes", "llama3", "mistral"]),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "<|python_tag|>",
                "[",
                "]",
                ";",
                ",",
                " ",
            ]
            + ['{"name": "f"}', ",", "{", "}", '"', "\\", "f", "[ARGS]", "{}", "x", "\n"]
        )
    ).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_any_text_is_parsed_equally_for_every_split(name: str, text: str, cuts: list[int]) -> None:
    assert parse(make_parser(name), split(text, cuts)) == parse(make_parser(name), [text])


def test_a_forced_call_has_the_text_as_its_arguments() -> None:
    parser = ForcedCall("f")
    calls: list[Any] = [message["tool_calls"][0] for message in map(parser.feed, ['{"a"', ": 1}"])]
    assert parser.finish() == {} and parser.feed("") == {}
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a"'} and calls[0]["id"]
    assert calls[1] == {"index": 0, "function": {"arguments": ": 1}"}}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"a": "', '"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "', '"}}]'),
    ],
)
def test_a_long_call_of_many_pieces_is_read(name: str, before: str, after: str) -> None:
    pieces = [before, *["x\\", '"{'] * 50_000, after]
    content, calls = parse(make_parser(name), pieces)
    assert content == "" and [function for function, _ in calls] == ["f"]
    assert len(calls[0][1]) == len('{"a": ""}') + 50_000 * len('x\\"{')

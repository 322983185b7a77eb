"""What a model speaks, from its configuration; what is wrong with its `OPENAI` parameters."""

from __future__ import annotations

import asyncio

import pytest

from host.config.parameters import check_openai_parameters
from host.config.pbtxt import parse_pbtxt
from host.frontends.openai.contract import Contract
from host.frontends.openai.contract_compiler import check_defaults, compile_contract
from host.frontends.openai.load_hook import check_contract, find_template_fault
from host.frontends.openai.model_files import ChatTemplate

TEXT = (
    'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]'
    ' output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]'
)
WRONG_OPENAI = (
    "OPENAI of model 'm' must list chat, completions, embeddings, transcriptions, images, speech,"
    " or be off; got"
)


def tensors(kind: str, *entries: str) -> str:
    """Writes tensors of `NAME:TYPE`, with `?` after the type of an optional input."""
    parts = (entry.split(":") for entry in entries)
    listed = ", ".join(
        f'{{ name: "{name}" data_type: TYPE_{kind.rstrip("?")} dims: [ 1 ]'
        + (" optional: true }" if kind.endswith("?") else " }")
        for name, kind in parts
    )
    return f"{kind} [{listed}]"


def parameters(**values: str) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in values.items()
    )


def compile_text(text: str, template: ChatTemplate | None = None) -> Contract:
    return compile_contract(parse_pbtxt(f'name: "m" {text}', "config.pbtxt"), template)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"OPENAI": "chats"}, f"{WRONG_OPENAI} 'chats', did you mean 'chat'?"),
        ({"OPENAI": "chat, xyz"}, f"{WRONG_OPENAI} 'xyz'"),
        (
            {"OPENAI_INPUTS": "PROMPT"},
            "OPENAI_INPUTS of model 'm' must look like INPUT=source, INPUT=source; got 'PROMPT'",
        ),
        (
            {"OPENAI_INPUTS": "A=prompt, A=stop"},
            "OPENAI_INPUTS of model 'm' names input 'A' twice",
        ),
        (
            {"OPENAI_OUTPUTS": "=text"},
            (
                "OPENAI_OUTPUTS of model 'm' must look like OUTPUT=meaning, OUTPUT=meaning; got"
                " '=text'"
            ),
        ),
        ({"OPENAI_DEFAULTS": "[]"}, "OPENAI_DEFAULTS of model 'm' is no JSON object"),
        ({"OPENAI_DEFAULTS": "{"}, "OPENAI_DEFAULTS of model 'm' is no JSON object"),
        (
            {"OPENAI_DEFAULTS": '{\\"temperature\\": 3}'},
            "OPENAI_DEFAULTS of model 'm': 'temperature' must be from 0 to 2, got 3",
        ),
        (
            {"OPENAI_TOOL_PARSER": "hermse"},
            (
                "OPENAI_TOOL_PARSER of model 'm' must be one of hermes, llama3, mistral;"
                " got 'hermse', did you mean 'hermes'?"
            ),
        ),
    ],
)
def test_a_wrong_value_of_a_parameter_is_a_finding(values: dict[str, str], problem: str) -> None:
    config = parse_pbtxt(f'name: "m" {parameters(**values)}', "config.pbtxt")
    findings = [*check_openai_parameters(config), *check_defaults(config)]
    assert [finding.text for finding in findings] == [problem]
    assert [finding.field for finding in findings] == [f"parameters[{next(iter(values))}]"]


@pytest.mark.parametrize(
    ("text", "values", "problem"),
    [
        (
            TEXT,
            {"OPENAI_INPUTS": "text_inptu=prompt"},
            (
                "OPENAI_INPUTS of model 'm' names input 'text_inptu', which the model does not"
                " have; did you mean 'text_input'?"
            ),
        ),
        (
            TEXT,
            {"OPENAI_OUTPUTS": "other=text"},
            "OPENAI_OUTPUTS of model 'm' names output 'other', which the model does not have",
        ),
        (
            tensors("input", "X:STRING?") + tensors("output", "Y:STRING"),
            {"OPENAI": "chat"},
            (
                "OPENAI asks for chat, but model 'm' has no input for a prompt, for messages or for"
                " the whole request: call one text_input, messages or openai_request, or say it in"
                " OPENAI_INPUTS"
            ),
        ),
        (
            TEXT,
            {"OPENAI": "chat"},
            (
                "OPENAI asks for chat, but model 'm' takes a prompt and has no chat template: put"
                " chat_template.jinja into its folder, or set OPENAI_CHAT_TEMPLATE in its"
                " configuration"
            ),
        ),
        (
            tensors("input", "prompt:STRING") + tensors("output", "A:STRING", "B:STRING"),
            {"OPENAI": "completions"},
            (
                "OPENAI asks for completions, but model 'm' has several outputs that could be the"
                " text: 'A', 'B'; say which in OPENAI_OUTPUTS"
            ),
        ),
        (
            tensors("input", "prompt:STRING") + tensors("output", "A:FP32"),
            {"OPENAI": "completions"},
            (
                "OPENAI asks for completions, but model 'm' has no output that could be the text;"
                " say which in OPENAI_OUTPUTS"
            ),
        ),
        (
            tensors("input", "text:STRING")
            + tensors("output", "A:FP32")
            + "model_transaction_policy { decoupled: true }",
            {"OPENAI": "embeddings"},
            "OPENAI asks for embeddings, but model 'm' is decoupled",
        ),
        (
            tensors("input", "text:STRING") + tensors("output", "A:STRING"),
            {"OPENAI": "embeddings"},
            "OPENAI asks for embeddings, but model 'm' has no floating-point output",
        ),
        (
            tensors("input", "prompt:STRING", "IMPORTANT:FP32") + tensors("output", "Y:STRING"),
            {"OPENAI": "completions"},
            (
                "input 'IMPORTANT' of model 'm' is required, and no request of OpenAI's has a"
                " field for it: make it optional, give it a default in OPENAI_DEFAULTS, or a"
                " source in OPENAI_INPUTS"
            ),
        ),
        (
            tensors("input", "X:FP32") + tensors("output", "Y:STRING"),
            {"OPENAI": "completions", "OPENAI_INPUTS": "X=prompt"},
            "source 'prompt' is text, but input 'X' of model 'm' is TYPE_FP32",
        ),
    ],
)
def test_parameters_that_do_not_fit_the_tensors_are_problems(
    text: str, values: dict[str, str], problem: str
) -> None:
    contract = compile_text(text + parameters(**values))
    assert [finding.text for finding in contract.problems] == [problem]


@pytest.mark.parametrize(
    ("text", "template", "routes"),
    [
        (TEXT, None, ["completions"]),
        (TEXT, ChatTemplate("x"), ["chat", "completions"]),
        (
            tensors("input", "TEXT_INPUT:STRING") + tensors("output", "TEXT_OUTPUT:STRING"),
            None,
            ["completions"],
        ),
        (
            tensors("input", "openai_request:STRING") + tensors("output", "openai_response:STRING"),
            None,
            ["chat"],
        ),
        (tensors("input", "messages:STRING") + tensors("output", "text:STRING"), None, ["chat"]),
        (
            tensors("input", "text_input:STRING", "embedding_request:STRING?")
            + tensors("output", "text_output:STRING"),
            None,
            ["completions", "embeddings"],
        ),
        (tensors("input", "text:STRING") + tensors("output", "vector:FP32"), None, []),
        (
            tensors("input", "text_input:STRING", "size:FP32")
            + tensors("output", "text_output:STRING"),
            None,
            [],
        ),
        (TEXT + parameters(OPENAI="off"), ChatTemplate("x"), []),
    ],
)
def test_routes_are_found_by_names_without_problems(
    text: str, template: ChatTemplate | None, routes: list[str]
) -> None:
    contract = compile_text(text, template)
    assert contract.routes == routes and not contract.problems


def test_a_required_input_takes_the_routes_away_that_do_not_fill_it() -> None:
    text = tensors("input", "messages:STRING", "prompt:STRING?") + tensors("output", "text:STRING")
    contract = compile_text(
        text + parameters(OPENAI="chat, completions", OPENAI_CHAT_TEMPLATE="last")
    )
    assert contract.routes == ["chat"] and not contract.problems
    assert contract.refusals["completions"] == (
        "model 'm' does not do completions: its input 'messages' is required, and requests of this"
        " route do not fill it"
    )


def test_a_default_fills_a_required_input() -> None:
    text = tensors("input", "prompt:STRING", "size:INT32") + tensors("output", "text:STRING")
    values = parameters(OPENAI="completions", OPENAI_DEFAULTS='{\\"size\\": 3}')
    assert compile_text(text + values).routes == ["completions"]


def test_a_template_that_a_parameter_names_must_be_readable_and_compile() -> None:
    text = TEXT + parameters(OPENAI_CHAT_TEMPLATE="my.jinja")
    config = parse_pbtxt(f'name: "m" {text}', "config.pbtxt")
    gone = ChatTemplate(complaint="it is gone")
    findings = list(check_contract(compile_contract(config, gone), config, gone))
    assert [finding.text for finding in findings] == ["it is gone"]
    broken = ChatTemplate("a\n{% for %}", file="my.jinja")
    fault = asyncio.run(find_template_fault(compile_contract(config, broken), broken))
    assert fault.startswith("OPENAI_CHAT_TEMPLATE of model 'm': 'my.jinja', line 2: ")

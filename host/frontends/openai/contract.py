"""What a model takes and gives on the OpenAI routes, compiled from its configuration.

Names of tensors say what they mean; `OPENAI` parameters of the configuration say the rest. The
rules are in docs/how-to/openai.md, How a model says what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from host.config.model_config import ModelConfig
from host.frontends.openai.fields import CHAT, COMPLETIONS, EMBEDDINGS
from host.inference.tensor_spec import wire_name

_ROUTES = (CHAT, COMPLETIONS, EMBEDDINGS)

_SOURCES = {
    "prompt": "prompt",
    "text_input": "prompt",
    "messages": "messages",
    "openai_request": "request",
    "input_ids": "tokens",
    "token_ids": "tokens",
    "input": "input",
    "text": "input",
    "texts": "input",
    "sampling_parameters": "sampling",
    "stream": "stream",
    "streaming": "stream",
    "exclude_input_in_output": "no_echo",
    "sampling_param_exclude_input_from_output": "no_echo",
    "return_finish_reason": "yes",
    "return_num_input_tokens": "yes",
    "return_num_output_tokens": "yes",
    "return_logprobs": "nothing",
    "return_cumulative_logprob": "nothing",
    "max_new_tokens": "max_tokens",
    "request_output_len": "max_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
    "bad_words": "nothing",
}
"""What fills an input, by its name in lowercase; other inputs take the field of their name."""

_MEANINGS = {
    **dict.fromkeys(
        ["text_output", "text", "generated_text", "output_text", "token", "completion"], "text"
    ),
    "openai_response": "response",
    "embedding": "embedding",
    "embeddings": "embedding",
    "sentence_embedding": "embedding",
    "finish_reason": "finish_reason",
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
    "logprobs": "logprobs",
    "tool_calls": "tool_calls",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
}
"""What an output means, by its name in lowercase."""

_FLOATS = ("FP16", "BF16", "FP32", "FP64")


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a model, and the source that fills it. `dims` include the batch dimension."""

    name: str
    source: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contract:
    """What one version of a model takes and gives.

    `outputs`: the meaning of each output by its name. `refusals`: why the model does not speak a
    route, by route; a route that is absent is spoken.
    """

    model: str
    inputs: tuple[Input, ...]
    outputs: Mapping[str, str]
    refusals: Mapping[str, str]
    template: str = ""
    other_names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_batch_size: int = 0
    decoupled: bool = False
    cached: bool = False

    def takes(self, source: str) -> bool:
        """Return whether an input has this source."""
        return any(entry.source == source for entry in self.inputs)

    def gives(self, meaning: str) -> bool:
        """Return whether an output has this meaning."""
        return meaning in self.outputs.values()

    @property
    def takes_whole_request(self) -> bool:
        """Whether the model gets the request as JSON."""
        return self.takes("request")

    @property
    def routes(self) -> list[str]:
        """The routes that the model speaks."""
        return [route for route in _ROUTES if route not in self.refusals]


def compile_contract(config: ModelConfig, template_found: bool = False) -> Contract:
    """Compile the contract of a model. `template_found`: a file of the model has a template.

    A wrong `OPENAI` parameter is the refusal of every route.
    """
    try:
        return _compile(config, template_found)
    except ValueError as error:
        return Contract(config.name, (), {}, dict.fromkeys(_ROUTES, str(error)))


def _compile(config: ModelConfig, template_found: bool) -> Contract:
    name: str = config.name
    asked = _asked_routes(config)
    sources = _pairs(config, "OPENAI_INPUTS", "INPUT=source")
    meanings = _pairs(config, "OPENAI_OUTPUTS", "OUTPUT=meaning")
    _check_names(config, "OPENAI_INPUTS", "input", sources, [entry.name for entry in config.input])
    _check_names(
        config, "OPENAI_OUTPUTS", "output", meanings, [entry.name for entry in config.output]
    )
    batch = (1,) if config.max_batch_size > 0 else ()
    inputs = tuple(
        Input(
            entry.name,
            sources.get(entry.name) or _SOURCES.get(entry.name.lower(), entry.name.lower()),
            wire_name(entry.data_type),
            (*batch, *entry.dims),
        )
        for entry in config.input
    )
    for entry in inputs:
        if entry.source in ("prompt", "messages", "request") and entry.datatype != "BYTES":
            raise ValueError(
                f"source '{entry.source}' is text, but input '{entry.name}' of model '{name}' is"
                f" TYPE_{entry.datatype}"
            )
    outputs = _output_meanings(config, meanings)
    template = _parameter(config, "OPENAI_CHAT_TEMPLATE")
    taken = {
        entry.source for entry in inputs if entry.source != "input" or entry.datatype == "BYTES"
    }
    given = set(outputs.values())
    detected = _detect_routes(config, asked, bool(template) or template_found)
    refusals: dict[str, str] = {}
    for route in _ROUTES:
        if route not in detected:
            wants_template = asked is None and "prompt" in taken and "text" in given
            refusals[route] = (
                _no_template(name) if route == CHAT and wants_template else _not_asked(name, route)
            )
        elif refusal := _refusal(
            name, route, taken, given, bool(template) or template_found, config
        ):
            refusals[route] = refusal
    return Contract(
        name,
        inputs,
        outputs,
        refusals,
        template,
        tuple(filter(None, map(str.strip, _parameter(config, "OPENAI_NAMES").split(",")))),
        _defaults(config),
        config.max_batch_size,
        config.model_transaction_policy.decoupled,
        config.response_cache.enable,
    )


def _parameter(config: ModelConfig, key: str) -> str:
    value: str = config.parameters[key].string_value if key in config.parameters else ""
    return value.strip()


def _asked_routes(config: ModelConfig) -> list[str] | None:
    """Return the routes of the parameter `OPENAI`; None without it."""
    text = _parameter(config, "OPENAI")
    if not text:
        return None
    if text == "off":
        return []
    routes = [route.strip() for route in text.split(",")]
    for route in routes:
        if route not in _ROUTES:
            raise ValueError(
                f"OPENAI of model '{config.name}' must list chat, completions, embeddings, or be"
                f" off; got '{route}'"
            )
    return routes


def _pairs(config: ModelConfig, key: str, form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, map(str.strip, _parameter(config, key).split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(
                f"{key} of model '{config.name}' must look like {form}, {form}; got '{part}'"
            )
        if name in pairs:
            raise ValueError(f"{key} of model '{config.name}' names '{name}' twice")
        pairs[name] = value
    return pairs


def _check_names(
    config: ModelConfig, key: str, kind: str, pairs: Mapping[str, str], known: list[str]
) -> None:
    for name in pairs:
        if name not in known:
            raise ValueError(
                f"{key} of model '{config.name}' names {kind} '{name}', which the model does not"
                " have"
            )


def _defaults(config: ModelConfig) -> dict[str, Any]:
    text = _parameter(config, "OPENAI_DEFAULTS")
    if not text:
        return {}
    try:
        defaults = json.loads(text)
    except (ValueError, RecursionError):
        defaults = None
    if not isinstance(defaults, dict):
        raise ValueError(f"OPENAI_DEFAULTS of model '{config.name}' is no JSON object")
    return defaults


def _output_meanings(config: ModelConfig, chosen: Mapping[str, str]) -> dict[str, str]:
    outputs: dict[str, str] = {}
    unnamed: dict[str, str] = {}  # datatypes of outputs whose names mean nothing
    for entry in config.output:
        meaning = chosen.get(entry.name) or _MEANINGS.get(entry.name.lower())
        if meaning is None:
            unnamed[entry.name] = wire_name(entry.data_type)
        else:
            outputs[entry.name] = meaning
    texts = [name for name, datatype in unnamed.items() if datatype == "BYTES"]
    if not {"text", "response"} & set(outputs.values()) and len(texts) == 1:
        outputs[texts[0]] = "text"
    vectors = [name for name, datatype in unnamed.items() if datatype in _FLOATS]
    if "embedding" not in outputs.values() and len(vectors) == 1:
        outputs[vectors[0]] = "embedding"
    return outputs


def _detect_routes(config: ModelConfig, asked: list[str] | None, has_template: bool) -> list[str]:
    """Return the asked routes; without the parameter, those of unmistakable tensor names."""
    if asked is not None:
        return asked
    inputs = {entry.name for entry in config.input if wire_name(entry.data_type) == "BYTES"}
    outputs = {entry.name for entry in config.output if wire_name(entry.data_type) == "BYTES"}
    routes = []
    if "text_input" in inputs and "text_output" in outputs:
        routes += [COMPLETIONS, CHAT] if has_template else [COMPLETIONS]
    if "openai_request" in inputs and "openai_response" in outputs:
        routes.append(CHAT)
    if "messages" in inputs and any(_MEANINGS.get(name.lower()) == "text" for name in outputs):
        routes.append(CHAT)
    return routes


def _not_asked(name: str, route: str) -> str:
    return f"model '{name}' does not do {route}; its configuration may say so with OPENAI"


def _no_template(name: str) -> str:
    return (
        f"model '{name}' does not do chat: it takes a prompt and has no chat template; put"
        " chat_template.jinja into its folder, or set OPENAI_CHAT_TEMPLATE in its configuration"
    )


def _refusal(
    name: str,
    route: str,
    taken: set[str],
    given: set[str],
    has_template: bool,
    config: ModelConfig,
) -> str:
    """Return why the model cannot speak a route that it should; "" if it can."""
    if route == EMBEDDINGS:
        if config.model_transaction_policy.decoupled:
            return f"OPENAI asks for embeddings, but model '{name}' is decoupled"
        if "embedding" not in given:
            return f"OPENAI asks for embeddings, but model '{name}' has no floating-point output"
        if not taken & {"input", "prompt"}:
            return f"OPENAI asks for embeddings, but model '{name}' has no input for texts"
        return ""
    if not given & {"text", "response"}:
        return (
            f"OPENAI asks for {route}, but model '{name}' has no output that could be the text;"
            " say which in OPENAI_OUTPUTS"
        )
    if "request" in taken or (route == CHAT and "messages" in taken):
        return ""
    if not taken & {"prompt", "tokens"} or (route == CHAT and "prompt" not in taken):
        return (
            f"OPENAI asks for {route}, but model '{name}' has no input for a prompt, for messages"
            " or for the whole request: call one text_input, messages or openai_request, or say it"
            " in OPENAI_INPUTS"
        )
    return _no_template(name) if route == CHAT and not has_template else ""

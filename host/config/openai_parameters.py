"""The `OPENAI` parameters of a configuration: their values, and the checks of these values.

The parameters are in docs/how-to/openai.md, How a model says what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig

ROUTES = ("chat", "completions", "embeddings", "transcriptions", "images", "speech")
"""The routes that `OPENAI` can list."""

TOOL_PARSERS = ("hermes", "llama3", "mistral")
"""The values of `OPENAI_TOOL_PARSER`."""

INPUTS, OUTPUTS = "OPENAI_INPUTS", "OPENAI_OUTPUTS"
TOKENIZER = "OPENAI_TOKENIZER"
LORA_SEPARATOR = "OPENAI_LORA_SEPARATOR"
_FORMS = {INPUTS: "INPUT=source", OUTPUTS: "OUTPUT=meaning"}
_KINDS = {INPUTS: "input", OUTPUTS: "output"}


def openai_parameter(config: ModelConfig, key: str) -> str:
    """Returns a parameter without white space at its ends; "" if it is not set."""
    value: str = config.parameters[key].string_value if key in config.parameters else ""
    return value.strip()


def asked_routes(config: ModelConfig) -> list[str] | None:
    """Returns the routes that `OPENAI` lists, none for `off`; None without the parameter."""
    text = openai_parameter(config, "OPENAI")
    if not text:
        return None
    return [] if text == "off" else _split(text)


def name_pairs(config: ModelConfig, key: str) -> dict[str, str]:
    """Returns what `OPENAI_INPUTS` or `OPENAI_OUTPUTS` says, by the name of the tensor."""
    parts = (part.partition("=") for part in _split(openai_parameter(config, key)))
    return {name.strip(): value.strip() for name, _, value in parts}


def other_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names that `OPENAI_NAMES` lists."""
    return tuple(_split(openai_parameter(config, "OPENAI_NAMES")))


def default_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of `OPENAI_DEFAULTS`; none if it is not a JSON object."""
    defaults = _parse_defaults(config)
    if not isinstance(defaults, dict):
        return {}
    return {name: value for name, value in defaults.items() if value is not None}


def check_openai_parameters(config: ModelConfig) -> Findings:
    """Checks the values of the parameters, as far as they can be checked without the tensors."""
    for route in asked_routes(config) or ():
        if route not in ROUTES:
            yield _finding(
                "OPENAI",
                f"OPENAI of model '{config.name}' must list {', '.join(ROUTES)}, or be off; got"
                f" '{route}'{suggestion(route, (*ROUTES, 'off'), ', ')}",
            )
    for key in _FORMS:
        yield from _check_pairs(config, key)
    if not isinstance(_parse_defaults(config), dict):
        yield _finding(
            "OPENAI_DEFAULTS", f"OPENAI_DEFAULTS of model '{config.name}' is no JSON object"
        )
    parser = openai_parameter(config, "OPENAI_TOOL_PARSER")
    if parser and parser not in TOOL_PARSERS:
        yield _finding(
            "OPENAI_TOOL_PARSER",
            f"OPENAI_TOOL_PARSER of model '{config.name}' must be one of"
            f" {', '.join(TOOL_PARSERS)}; got '{parser}'{suggestion(parser, TOOL_PARSERS, ', ')}",
        )


def suggestion(text: str, known: Iterable[str], separator: str = "; ") -> str:
    """Returns `did you mean ...?` with the known name that is most like the text, or ""."""
    found = get_close_matches(text, list(known), 1)
    return f"{separator}did you mean '{found[0]}'?" if found else ""


def _check_pairs(config: ModelConfig, key: str) -> Findings:
    form = _FORMS[key]
    seen: set[str] = set()
    for part in _split(openai_parameter(config, key)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            text = f"{key} of model '{config.name}' must look like {form}, {form}; got '{part}'"
            yield _finding(key, text)
        elif name in seen:
            yield _finding(
                key, f"{key} of model '{config.name}' names {_KINDS[key]} '{name}' twice"
            )
        seen.add(name)


def _parse_defaults(config: ModelConfig) -> Any:
    try:
        return json.loads(openai_parameter(config, "OPENAI_DEFAULTS") or "{}")
    except (ValueError, RecursionError):
        return None


def _split(text: str) -> list[str]:
    return [part for part in map(str.strip, text.split(",")) if part]


def _finding(key: str, text: str) -> Finding:
    return Finding(text, f"parameters[{key}]")

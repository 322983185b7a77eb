"""The parameters of a configuration that pbhost reads itself: accessors, and checks of the values.

Those of OpenAI's API are in docs/how-to/openai.md, How a model says what it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig
from host.errors import ErrorCode

CONCURRENCY_PARAMETER = "ASYNC_EXECUTE_CONCURRENCY"
"""The parameter with the number of batches that an `async def execute` may run concurrently."""

_DEFAULT_CONCURRENCY, _MAX_CONCURRENCY = 32, 4096

ORDER_PARAMETER = "PRESERVE_ORDERING"
"""The parameter of an ensemble that says whether the responses of a request keep their order."""

_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
_FORCE_CPU_MESSAGES = {
    "yes": "Forcing CPU only input tensors.",
    "no": "Input tensors can be both in CPU and GPU. FORCE_CPU_ONLY_INPUT_TENSORS is off.",
}


def max_concurrent_batches(config: ModelConfig) -> int:
    """The number of batches that an `async def execute` may run concurrently, at least 1.

    The default for a sequence model is 1, because the requests of a sequence depend on each other.
    """
    if CONCURRENCY_PARAMETER in config.parameters:
        return int(config.parameters[CONCURRENCY_PARAMETER].string_value)
    return 1 if config.HasField("sequence_batching") else _DEFAULT_CONCURRENCY


def check_max_concurrent_batches(config: ModelConfig) -> Findings:
    """Checks that ASYNC_EXECUTE_CONCURRENCY, if it is set, is a number in range."""
    return _check_number(config, CONCURRENCY_PARAMETER, _MAX_CONCURRENCY)


def preserves_ordering(config: ModelConfig) -> bool:
    """Whether the responses of a request keep their order through every step of the ensemble."""
    return _switch(config, ORDER_PARAMETER) is not False


def check_preserves_ordering(config: ModelConfig) -> Findings:
    """Checks that PRESERVE_ORDERING of an ensemble, if it is set, is `yes` or `no`."""
    if config.HasField("ensemble_scheduling"):
        yield from _check_switch(config, ORDER_PARAMETER)


def input_memory_message(config: ModelConfig) -> str:
    """The log line for FORCE_CPU_ONLY_INPUT_TENSORS, "" if the parameter is not set.

    The parameter has no other effect: inputs are always in host memory, where requests arrive
    (docs/reference/model-processes.md, "Parameters that the server reads").
    """
    if _FORCE_CPU not in config.parameters:
        return ""
    return _FORCE_CPU_MESSAGES[config.parameters[_FORCE_CPU].string_value]


def check_input_memory(config: ModelConfig) -> Findings:
    """Checks that FORCE_CPU_ONLY_INPUT_TENSORS, if it is set, is `yes` or `no`."""
    if _FORCE_CPU not in config.parameters:
        return
    value = config.parameters[_FORCE_CPU].string_value
    if value not in _FORCE_CPU_MESSAGES:
        # Triton's text has the unbalanced quote.
        yield Finding(
            f"Incorrect value for {_FORCE_CPU}: {value}'",
            f"parameters[{_FORCE_CPU}]",
            ErrorCode.UNSUPPORTED,
        )


ON_DEMAND_PARAMETER = "LOAD_ON_DEMAND"
"""The parameter that says whether the first request loads the model: `yes` or `no`."""

PINNED_PARAMETER = "PINNED"
"""The parameter with which a loaded model is never unloaded to make room: `yes` or `no`."""

MEMORY_PARAMETER = "MEMORY_BYTES"
"""The parameter with the bytes of host memory that a version needs with all its instances."""

GPU_MEMORY_PARAMETER = "GPU_MEMORY_BYTES"
"""The parameter with the bytes that a version needs on each GPU that it has instances on."""

INITIALIZING_PARAMETER = "MAX_INITIALIZING_INSTANCES"
"""The parameter with the number of instances of the model that initialise at the same time."""

PRELOAD_PARAMETER = "PRELOAD"
"""The parameter that says whether instances are forked from a process that has prepared the model:
`yes` or `no`. Without it, that is so if the model has a static method `preload`."""

_SWITCHES = (ON_DEMAND_PARAMETER, PINNED_PARAMETER, PRELOAD_PARAMETER)
_NUMBERS = {
    MEMORY_PARAMETER: 1 << 50,
    GPU_MEMORY_PARAMETER: 1 << 50,
    INITIALIZING_PARAMETER: 4096,
}


def loads_on_demand(config: ModelConfig, default: bool) -> bool:
    """Whether a request loads the model if it is not loaded; `default`: without the parameter."""
    wanted = _switch(config, ON_DEMAND_PARAMETER)
    return default if wanted is None else wanted


def is_pinned(config: ModelConfig) -> bool:
    """Whether the model, once loaded, is never unloaded to make room for others."""
    return bool(_switch(config, PINNED_PARAMETER))


def wants_preload(config: ModelConfig) -> bool | None:
    """Whether the model is prepared in a process of its own; None without the parameter."""
    return _switch(config, PRELOAD_PARAMETER)


def stated_memory(config: ModelConfig) -> int:
    """The bytes of host memory that the configuration states for one version, 0 if it does not."""
    return _number(config, MEMORY_PARAMETER)


def stated_gpu_memory(config: ModelConfig) -> int:
    """The bytes that the configuration states for one version on each GPU, 0 if it does not."""
    return _number(config, GPU_MEMORY_PARAMETER)


def max_initializing_instances(config: ModelConfig) -> int:
    """The number of instances that initialise at the same time, 0 for no limit."""
    return _number(config, INITIALIZING_PARAMETER)


def _switch(config: ModelConfig, parameter: str) -> bool | None:
    """Whether a parameter is `yes`; None if it is not set."""
    if parameter not in config.parameters:
        return None
    return bool(config.parameters[parameter].string_value == "yes")


def _number(config: ModelConfig, parameter: str) -> int:
    if parameter not in config.parameters:
        return 0
    return int(config.parameters[parameter].string_value)


def check_load_parameters(config: ModelConfig) -> Findings:
    """Checks that the parameters that are set have valid values."""
    for parameter in _SWITCHES:
        yield from _check_switch(config, parameter)
    for parameter, most in _NUMBERS.items():
        yield from _check_number(config, parameter, most)


def _check_switch(config: ModelConfig, parameter: str) -> Findings:
    if parameter in config.parameters:
        text = config.parameters[parameter].string_value
        if text not in ("yes", "no"):
            yield _finding(config, parameter, "must be 'yes' or 'no'", text)


def _check_number(config: ModelConfig, parameter: str, most: int) -> Findings:
    if parameter in config.parameters:
        text = config.parameters[parameter].string_value
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most):
            yield _finding(config, parameter, f"must be a whole number from 1 to {most}", text)


def _finding(config: ModelConfig, parameter: str, rule: str, text: str) -> Finding:
    return Finding(
        f"parameter '{parameter}' of model '{config.name}' {rule}, got '{text[:100]}'",
        f"parameters[{parameter}]",
    )


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
            yield _openai_finding(
                "OPENAI",
                f"OPENAI of model '{config.name}' must list {', '.join(ROUTES)}, or be off; got"
                f" '{route}'{suggestion(route, (*ROUTES, 'off'), ', ')}",
            )
    for key in _FORMS:
        yield from _check_pairs(config, key)
    if not isinstance(_parse_defaults(config), dict):
        yield _openai_finding(
            "OPENAI_DEFAULTS", f"OPENAI_DEFAULTS of model '{config.name}' is no JSON object"
        )
    parser = openai_parameter(config, "OPENAI_TOOL_PARSER")
    if parser and parser not in TOOL_PARSERS:
        yield _openai_finding(
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
            yield _openai_finding(key, text)
        elif name in seen:
            yield _openai_finding(
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


def _openai_finding(key: str, text: str) -> Finding:
    return Finding(text, f"parameters[{key}]")


CANARY_PARAMETER = "CANARY"
"""The parameter with the version that gets a share of the requests, and the share in percent."""

SHADOW_PARAMETER = "SHADOW"
"""The parameter with the version that gets copies of a share of the requests, and the share."""

_SHARE = re.compile(r"([0-9]{1,18}):([0-9]{1,3}(?:\.[0-9]{1,6})?)")


class TrafficShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of the requests that a version gets. `percent`: above 0, up to 100."""

    version: int
    percent: float


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """How the requests that name no version are split. `canary` answers them, `shadow` does not."""

    canary: TrafficShare | None = None
    shadow: TrafficShare | None = None


def traffic_settings(config: ModelConfig) -> TrafficSettings:
    """The settings of a checked configuration."""
    return TrafficSettings(_share(config, CANARY_PARAMETER), _share(config, SHADOW_PARAMETER))


def check_traffic_parameters(config: ModelConfig) -> Findings:
    """Checks that the parameters that are set have valid values."""
    for parameter in (CANARY_PARAMETER, SHADOW_PARAMETER):
        if parameter in config.parameters and _share(config, parameter) is None:
            text = config.parameters[parameter].string_value
            yield Finding(
                f"parameter '{parameter}' of model '{config.name}' must be <version>:<percent>,"
                f" with a percentage above 0 and up to 100, got '{text[:100]}'",
                f"parameters[{parameter}]",
            )


def is_percentage(percent: float) -> bool:
    """Whether a number can be the percentage of a share."""
    return math.isfinite(percent) and 0 < percent <= 100


def _share(config: ModelConfig, parameter: str) -> TrafficShare | None:
    """The share of a parameter; None if it is not set, or invalid."""
    if parameter not in config.parameters:
        return None
    found = _SHARE.fullmatch(config.parameters[parameter].string_value.strip())
    if found is None or not is_percentage(float(found[2])):
        return None
    return TrafficShare(int(found[1]), float(found[2]))

"""Config parameters of loading: on demand or not, memory, and instances that initialise at once."""

from __future__ import annotations

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig

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
    if ON_DEMAND_PARAMETER not in config.parameters:
        return default
    return bool(config.parameters[ON_DEMAND_PARAMETER].string_value == "yes")


def is_pinned(config: ModelConfig) -> bool:
    """Whether the model, once loaded, is never unloaded to make room for others."""
    if PINNED_PARAMETER not in config.parameters:
        return False
    return bool(config.parameters[PINNED_PARAMETER].string_value == "yes")


def wants_preload(config: ModelConfig) -> bool | None:
    """Whether the model is prepared in a process of its own; None without the parameter."""
    if PRELOAD_PARAMETER not in config.parameters:
        return None
    return bool(config.parameters[PRELOAD_PARAMETER].string_value == "yes")


def stated_memory(config: ModelConfig) -> int:
    """The bytes of host memory that the configuration states for one version, 0 if it does not."""
    return _number(config, MEMORY_PARAMETER)


def stated_gpu_memory(config: ModelConfig) -> int:
    """The bytes that the configuration states for one version on each GPU, 0 if it does not."""
    return _number(config, GPU_MEMORY_PARAMETER)


def max_initializing_instances(config: ModelConfig) -> int:
    """The number of instances that initialise at the same time, 0 for no limit."""
    return _number(config, INITIALIZING_PARAMETER)


def _number(config: ModelConfig, parameter: str) -> int:
    if parameter not in config.parameters:
        return 0
    return int(config.parameters[parameter].string_value)


def check_load_parameters(config: ModelConfig) -> Findings:
    """Checks that the parameters that are set have valid values."""
    for parameter in _SWITCHES:
        if parameter in config.parameters:
            text = config.parameters[parameter].string_value
            if text not in ("yes", "no"):
                yield _finding(config, parameter, "must be 'yes' or 'no'", text)
    for parameter, most in _NUMBERS.items():
        if parameter in config.parameters:
            text = config.parameters[parameter].string_value
            if not (
                text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most
            ):
                yield _finding(config, parameter, f"must be a whole number from 1 to {most}", text)


def _finding(config: ModelConfig, parameter: str, rule: str, text: str) -> Finding:
    return Finding(
        f"parameter '{parameter}' of model '{config.name}' {rule}, got '{text[:100]}'",
        f"parameters[{parameter}]",
    )

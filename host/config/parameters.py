"""Config parameters that the host reads itself: concurrency of `execute`, memory of inputs."""

from __future__ import annotations

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
    if CONCURRENCY_PARAMETER not in config.parameters:
        return
    text = config.parameters[CONCURRENCY_PARAMETER].string_value
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_CONCURRENCY):
        yield Finding(
            f"parameter '{CONCURRENCY_PARAMETER}' of model '{config.name}' must be a whole"
            f" number from 1 to {_MAX_CONCURRENCY}, got '{text}'",
            f"parameters[{CONCURRENCY_PARAMETER}]",
        )


def preserves_ordering(config: ModelConfig) -> bool:
    """Whether the responses of a request keep their order through every step of the ensemble."""
    if ORDER_PARAMETER not in config.parameters:
        return True
    return bool(config.parameters[ORDER_PARAMETER].string_value != "no")


def check_preserves_ordering(config: ModelConfig) -> Findings:
    """Checks that PRESERVE_ORDERING of an ensemble, if it is set, is `yes` or `no`."""
    if ORDER_PARAMETER not in config.parameters or not config.HasField("ensemble_scheduling"):
        return
    text = config.parameters[ORDER_PARAMETER].string_value
    if text not in ("yes", "no"):
        yield Finding(
            f"parameter '{ORDER_PARAMETER}' of model '{config.name}' must be 'yes' or 'no', got"
            f" '{text[:100]}'",
            f"parameters[{ORDER_PARAMETER}]",
        )


def input_memory_message(config: ModelConfig) -> str:
    """The log line for FORCE_CPU_ONLY_INPUT_TENSORS, "" if the parameter is not set.

    The parameter has no other effect: inputs are always in host memory, where requests arrive
    (docs/reference/model-api.md, "Parameters that the server reads").
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

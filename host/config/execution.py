"""How many batches an instance works on at a time."""

from __future__ import annotations

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig

CONCURRENCY_PARAMETER = "ASYNC_EXECUTE_CONCURRENCY"
"""The config parameter: batches that an `async def execute` may work on at a time."""

_DEFAULT, _MAX = 32, 4096


def max_concurrent_batches(config: ModelConfig) -> int:
    """Batches at a time of an `async def execute`, at least 1.

    A sequence's requests depend on each other, so they never overlap unless it is asked for.
    """
    if CONCURRENCY_PARAMETER in config.parameters:
        return int(config.parameters[CONCURRENCY_PARAMETER].string_value)
    return 1 if config.HasField("sequence_batching") else _DEFAULT


def check_max_concurrent_batches(config: ModelConfig) -> Findings:
    """The parameter, if it is there, is a number that makes sense."""
    if CONCURRENCY_PARAMETER not in config.parameters:
        return
    text = config.parameters[CONCURRENCY_PARAMETER].string_value
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX):
        yield Finding(
            f"parameter '{CONCURRENCY_PARAMETER}' of model '{config.name}' must be a whole"
            f" number from 1 to {_MAX}, got '{text}'",
            f"parameters[{CONCURRENCY_PARAMETER}]",
        )

"""Rejects configurations that ask for features that this host does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from host.config.findings import Finding, Findings
from host.config.parameters import check_input_memory
from host.config.schema import ModelConfig
from host.errors import ErrorCode

_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """An unsupported field. `requested` tells whether a configuration uses it."""

    field: str
    reason: str
    requested: Callable[[ModelConfig], bool]


_UNSUPPORTED = (
    _Unsupported(
        f"parameters[{_STRATEGY}]",
        "batching strategies from shared libraries are not supported",
        lambda config: _STRATEGY in config.parameters,
    ),
    _Unsupported(
        "batch_output",
        "the responses of a decoupled model do not form a batch",
        lambda config: bool(config.batch_output and config.model_transaction_policy.decoupled),
    ),
)


def check_supported(config: ModelConfig) -> Findings:
    """Checks that the configuration uses only supported features."""
    yield from check_input_memory(config)
    for unsupported in _UNSUPPORTED:
        if unsupported.requested(config):
            yield Finding(
                f"model '{config.name}' cannot be loaded: {unsupported.reason}, "
                f"remove '{unsupported.field}' from its configuration",
                unsupported.field,
                ErrorCode.UNSUPPORTED,
            )

"""What a configuration may ask for and this host does not do, refused instead of ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from host.config.findings import Finding, Findings
from host.config.input_memory import check_input_memory
from host.config.schema import ModelConfig
from host.errors import ErrorCode

_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A field that is refused when `asked` says that it has an effect."""

    field: str
    reason: str
    asked: Callable[[ModelConfig], bool]


# A feature that arrives deletes its line here.
_REFUSALS = (
    _Refusal(
        f"parameters[{_STRATEGY}]",
        "batching strategies from shared libraries are not supported",
        lambda config: _STRATEGY in config.parameters,
    ),
    _Refusal(
        "batch_output",
        "the responses of a decoupled model are not made of a batch",
        lambda config: bool(config.batch_output and config.model_transaction_policy.decoupled),
    ),
)


def check_supported(config: ModelConfig) -> Findings:
    """Every field that asks for something this host cannot honour."""
    yield from check_input_memory(config)
    for refusal in _REFUSALS:
        if refusal.asked(config):
            yield Finding(
                f"model '{config.name}' cannot be loaded: {refusal.reason}, "
                f"remove '{refusal.field}' from its configuration",
                refusal.field,
                ErrorCode.UNSUPPORTED,
            )

"""Where a model's inputs may lie: the parameter FORCE_CPU_ONLY_INPUT_TENSORS."""

from __future__ import annotations

from host.config.findings import Finding, Findings
from host.config.schema import ModelConfig
from host.errors import ErrorCode

_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
_MESSAGES = {
    "yes": "Forcing CPU only input tensors.",
    "no": "Input tensors can be both in CPU and GPU. FORCE_CPU_ONLY_INPUT_TENSORS is off.",
}


def input_memory_message(config: ModelConfig) -> str:
    """What the log says about it (pb_utils spec 1.6), nothing if the model does not care.

    Inputs lie in host memory whatever it says: that is where requests arrive.
    """
    if _FORCE_CPU not in config.parameters:
        return ""
    return _MESSAGES[config.parameters[_FORCE_CPU].string_value]


def check_input_memory(config: ModelConfig) -> Findings:
    """The parameter, if it is there, is yes or no."""
    if _FORCE_CPU not in config.parameters:
        return
    value = config.parameters[_FORCE_CPU].string_value
    if value not in _MESSAGES:
        # The unbalanced quote is part of the text.
        yield Finding(
            f"Incorrect value for {_FORCE_CPU}: {value}'",
            f"parameters[{_FORCE_CPU}]",
            ErrorCode.UNSUPPORTED,
        )

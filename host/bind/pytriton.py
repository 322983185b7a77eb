"""PyTriton's names for `host.bind`: a program of PyTriton has to change only its imports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from host.bind import (
    BadCallError,
    BadSpecError,
    ConstantPadder,
    DeviceKind,
    DynamicBatcher,
    Host,
    ModelConfig,
    QueuePolicy,
    Request,
    TimeoutAction,
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from host.bind import BindError as PyTritonError
from host.bind import TensorSpec as Tensor
from host.bind import UnrecoverableError as PyTritonUnrecoverableError

PyTritonBadParameterError = PyTritonInvalidConfigError = BadSpecError
PyTritonRuntimeError = PyTritonValidationError = BadCallError


class TritonConfig(SimpleNamespace):
    """Flags of `pbhost serve` by name: `TritonConfig(http_port=8000, log_verbose=1)`."""


class Triton(Host):
    """`Host` with its flags in one object. `workspace` has no effect, as no files are written."""

    def __init__(self, *, config: TritonConfig | None = None, workspace: object = None) -> None:
        flags: Any = vars(config) if config is not None else {}
        super().__init__(**flags)


__all__ = [
    "ConstantPadder",
    "DeviceKind",
    "DynamicBatcher",
    "ModelConfig",
    "PyTritonBadParameterError",
    "PyTritonError",
    "PyTritonInvalidConfigError",
    "PyTritonRuntimeError",
    "PyTritonUnrecoverableError",
    "PyTritonValidationError",
    "QueuePolicy",
    "Request",
    "Tensor",
    "TimeoutAction",
    "Triton",
    "TritonConfig",
    "batch",
    "fill_optionals",
    "first_value",
    "group_by_keys",
    "group_by_values",
    "pad_batch",
    "sample",
    "triton_context",
]

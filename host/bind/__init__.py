"""Serves plain Python functions as models, without a model repository.

`Host` serves functions; `TensorSpec` and `ModelConfig` describe them. A function is called with a
list of `Request`; decorators convert this list to arrays. Only `Host.run` and `Host.serve` need a
server: tests can call decorated functions directly, see `bound_as`.
"""

from host.bind.decorators import (
    ConstantPadder,
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from host.bind.host import Host
from host.bind.requests import Request, bound_as
from host.bind.specs import (
    BadCallError,
    BadSpecError,
    BindError,
    DeviceKind,
    DynamicBatcher,
    HostFailure,
    ModelConfig,
    ModelSpec,
    QueuePolicy,
    TensorSpec,
    TimeoutAction,
    UnrecoverableError,
)

__all__ = [
    "BadCallError",
    "BadSpecError",
    "BindError",
    "ConstantPadder",
    "DeviceKind",
    "DynamicBatcher",
    "Host",
    "HostFailure",
    "ModelConfig",
    "ModelSpec",
    "QueuePolicy",
    "Request",
    "TensorSpec",
    "TimeoutAction",
    "UnrecoverableError",
    "batch",
    "bound_as",
    "fill_optionals",
    "first_value",
    "group_by_keys",
    "group_by_values",
    "pad_batch",
    "sample",
    "triton_context",
]

"""Descriptions of bound models: tensors, batching, queue policies; and the errors of bindings."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


class BindError(Exception):
    """Base of all errors of this package. The text says what failed and what to do."""


class BadSpecError(BindError, ValueError):
    """The description of a model, or an argument of a decorator, cannot be used."""


class BadCallError(BindError, ValueError):
    """A decorator cannot process the requests, or the outputs of a function are invalid."""


class HostFailure(BindError):
    """The host could not start, refused a model, or has exited."""


class UnrecoverableError(BindError):
    """Raised by a function after which no call can succeed.

    The client gets the text. From then on, the model is not ready and refuses all requests.
    """


_TYPES = {
    "bool": "BOOL",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
_TEXTS = (np.dtype(np.bytes_).kind, np.dtype(np.str_).kind, np.dtype(np.object_).kind)


def triton_datatype(dtype: npt.DTypeLike) -> str:
    """Returns the data type in a model configuration, without `TYPE_`.

    bytes, str and object are STRING. Raises BadSpecError.
    """
    try:
        known = np.dtype(dtype)
    except TypeError:
        raise BadSpecError(f"{dtype!r} is not a numpy dtype") from None
    if known.kind in _TEXTS:
        return "STRING"
    name = _TYPES.get(known.name)
    if name is None:
        raise BadSpecError(
            f"dtype {known.name} has no data type in the protocol; these have: {', '.join(_TYPES)},"
            " and bytes, str and object for text"
        )
    return name


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    `shape` has no batch dimension; -1 means any size. `dtype` is a numpy dtype; `np.bytes_`,
    `np.object_` and `np.str_` are text (BYTES). `name` is `INPUT_1`, `INPUT_2`, ... or `OUTPUT_1`,
    ... by default. `optional`: requests may lack this input.
    """

    shape: Sequence[int]
    dtype: npt.DTypeLike
    name: str | None = None
    optional: bool | None = False

    def __post_init__(self) -> None:
        """Raises BadSpecError."""
        what = f"tensor '{self.name}'" if self.name else "a tensor"
        if isinstance(self.shape, (str, bytes)) or not isinstance(self.shape, Sequence):
            raise BadSpecError(f"{what} needs a tuple as its shape, got {self.shape!r}")
        for size in self.shape:
            if not isinstance(size, (int, np.integer)) or size < -1 or size == 0:
                raise BadSpecError(
                    f"{what} has shape {tuple(self.shape)!r}: sizes are at least 1, or -1 for any"
                )
        triton_datatype(self.dtype)

    def config(self) -> dict[str, Any]:
        """Converts to the form of a model configuration."""
        dims = [int(size) for size in self.shape]
        return {"name": self.name, "data_type": f"TYPE_{triton_datatype(self.dtype)}", "dims": dims}


class DeviceKind(enum.Enum):
    """Where instances run. Has no effect, as the function itself selects its device."""

    KIND_AUTO = "KIND_AUTO"
    KIND_CPU = "KIND_CPU"
    KIND_GPU = "KIND_GPU"


class TimeoutAction(enum.Enum):
    """What happens to a request after its queue timeout."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True)
class QueuePolicy:
    """Limits of a queue. A size or timeout of 0 means no limit."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def config(self) -> dict[str, Any]:
        """Converts to the form of a model configuration."""
        return {
            "timeout_action": self.timeout_action.value,
            "default_timeout_microseconds": self.default_timeout_microseconds,
            "allow_timeout_override": self.allow_timeout_override,
            "max_queue_size": self.max_queue_size,
        }


@dataclass(frozen=True)
class DynamicBatcher:
    """Settings of the dynamic batcher.

    Source: docs/reference/scheduling.md, "Control tensors".
    """

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: Sequence[int] | None = None
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: Mapping[int, QueuePolicy] | None = None

    def __post_init__(self) -> None:
        """Raises BadSpecError."""
        sizes = self.preferred_batch_size
        if sizes is not None and not isinstance(sizes, Sequence):
            raise BadSpecError(f"preferred_batch_size must be a list of sizes, got {sizes!r}")

    def config(self) -> dict[str, Any]:
        """Converts to the form of a model configuration."""
        config: dict[str, Any] = {
            "max_queue_delay_microseconds": self.max_queue_delay_microseconds,
            "preferred_batch_size": list(self.preferred_batch_size or ()),
            "preserve_ordering": self.preserve_ordering,
            "priority_levels": self.priority_levels,
            "default_priority_level": self.default_priority_level,
        }
        if self.default_queue_policy is not None:
            config["default_queue_policy"] = self.default_queue_policy.config()
        if self.priority_queue_policy:
            config["priority_queue_policy"] = {
                str(level): policy.config() for level, policy in self.priority_queue_policy.items()
            }
        return config


@dataclass(frozen=True)
class ModelConfig:
    """How a function is served.

    `batching`: every tensor has a batch dimension, and a batch has at most `max_batch_size`
    samples. `batcher`: joins the requests of several clients to batches; None joins none.
    `response_cache`: repeated requests are answered from the response cache, if the host has one.
    `decoupled`: the function is a generator of any number of responses.
    """

    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False

    def __post_init__(self) -> None:
        """Raises BadSpecError."""
        if not is_integer(self.max_batch_size):
            raise BadSpecError(f"max_batch_size must be an int, got {self.max_batch_size!r}")
        if self.batcher is not None and not isinstance(self.batcher, DynamicBatcher):
            raise BadSpecError(
                f"batcher must be a DynamicBatcher or None, got {type(self.batcher).__name__}"
            )
        if self.batching and self.max_batch_size < 1:
            raise BadSpecError(
                f"max_batch_size is at least 1 with batching, got {self.max_batch_size}"
            )


@dataclass(frozen=True)
class ModelSpec:
    """The whole description of a bound model. `strict`: outputs are checked against it."""

    name: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    config: ModelConfig = field(default_factory=ModelConfig)
    version: int = 1
    strict: bool = False
    instances: int = 1

    def __post_init__(self) -> None:
        """Raises BadSpecError."""
        if not isinstance(self.name, str):
            raise BadSpecError(f"the name of a model must be a str, got {self.name!r}")
        # The host writes a directory for each model, so the name must be valid as one.
        length = len(self.name.encode(errors="surrogatepass"))
        if self.name == "." or self.name != self.name.strip() or "\0" in self.name or length > 255:
            raise BadSpecError(
                f"{self.name!r:.60} cannot be the name of a model: it must be the name of a folder,"
                " without spaces around it, of at most 255 bytes"
            )
        if not is_integer(self.version) or not 0 <= self.version < 1 << 63:
            raise BadSpecError(
                f"model_version of '{self.name}' must be an int from 0 on, got {self.version!r}"
            )

    @property
    def max_batch_size(self) -> int:
        """The maximum number of samples in a batch; 0 without batching."""
        return self.config.max_batch_size if self.config.batching else 0

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, in their order."""
        return [str(output.name) for output in self.outputs]

    def model_config(self) -> dict[str, Any]:
        """The model configuration for the host."""
        inputs = [
            {**spec.config(), **({"optional": True} if spec.optional else {})}
            for spec in self.inputs
        ]
        config: dict[str, Any] = {
            "name": self.name,
            "backend": "python",
            "max_batch_size": int(self.max_batch_size),
            "version_policy": {"all": {}},
            "input": inputs,
            "output": [spec.config() for spec in self.outputs],
            "instance_group": [{"count": self.instances, "kind": "KIND_CPU"}],
        }
        if self.config.batching and self.config.batcher is not None:
            config["dynamic_batching"] = self.config.batcher.config()
        if self.config.decoupled:
            config["model_transaction_policy"] = {"decoupled": True}
        if self.config.response_cache:
            config["response_cache"] = {"enable": True}
        return config


def is_integer(value: object) -> bool:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def with_default_names(specs: Sequence[TensorSpec], kind: str) -> list[TensorSpec]:
    """Adds missing names, such as `INPUT_1` for kind INPUT. Raises BadSpecError."""
    if not isinstance(specs, Sequence):
        raise BadSpecError(
            f"{kind.lower()}s must be a list of TensorSpec, got {type(specs).__name__}"
        )
    result: list[TensorSpec] = []
    for number, spec in enumerate(specs, 1):
        if not isinstance(spec, TensorSpec):
            raise BadSpecError(
                f"{kind.lower()} {number} must be a TensorSpec, got {type(spec).__name__}"
            )
        name = spec.name or f"{kind}_{number}"
        if name in (other.name for other in result):
            raise BadSpecError(f"two {kind.lower()}s have the name '{name}'")
        result.append(TensorSpec(tuple(spec.shape), spec.dtype, name, spec.optional))
    if not result:
        raise BadSpecError(f"a model needs at least one {kind.lower()}")
    return result

"""The step models, the signature and the tensor memory that one request to an ensemble uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.errors import HostError
from host.inference.request import Tensor
from host.models.registry import LoadedModel

_MAX_VALIDATION_KEYS = 32  # of requests of one step


@dataclass(frozen=True, slots=True)
class StepModel:
    """The model of a step, and the shapes of its inputs without batch dimension."""

    model: LoadedModel
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool
    _validation_keys: dict[object, object] = field(default_factory=dict)

    def validation_key(self, inputs: Sequence[Tensor]) -> object:
        """The `InferRequest.validation_key` of requests of this step with these inputs."""
        form = tuple([(t.name, t.datatype, len(t.data), *t.shape) for t in inputs])
        if len(self._validation_keys) >= _MAX_VALIDATION_KEYS:
            self._validation_keys.clear()
        return self._validation_keys.setdefault(form, form)


@dataclass(frozen=True, slots=True)
class EnsembleSignature:
    """What clients see of an ensemble; `dims`: the shapes of its outputs.

    `ordered`: whether the responses of a request keep their order through every step.
    """

    name: str
    version: int
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool
    ordered: bool = True


class TensorMemory(Protocol):
    """Memory for tensors of an ensemble."""

    def move_to_shared_memory(self, tensor: Tensor) -> None:
        """Moves a tensor to shared memory of the host. Raises HostError if that is full."""

    def write_outputs(self, slots: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
        """Writes outputs to memory of the client; returns the error if that fails."""

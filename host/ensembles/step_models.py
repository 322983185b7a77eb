"""The step models, the signature and the tensor memory that one request to an ensemble uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.errors import HostError
from host.inference.request import KnownShapes, Tensor
from host.models.registry import LoadedModel


@dataclass(frozen=True, slots=True)
class StepModel:
    """The model of a step, and the shapes of its inputs without batch dimension."""

    model: LoadedModel
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool
    shapes: KnownShapes = field(default_factory=KnownShapes)


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

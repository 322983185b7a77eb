"""Whom a request to an ensemble has to do with: its face to clients, its members, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.errors import HostError
from host.inference.request import Tensor
from host.models.registry import LoadedModel

_MAX_VALIDATION_KEYS = 32  # of a step's requests that are remembered


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model that runs a step, and the shapes of its inputs without batch dimension."""

    model: LoadedModel
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool
    _validation_keys: dict[object, object] = field(default_factory=dict)

    def validation_key(self, inputs: Sequence[Tensor]) -> object:
        """What requests of the step with these inputs share, as `InferRequest.form` wants it."""
        form = tuple([(t.name, t.datatype, len(t.data), *t.shape) for t in inputs])
        if len(self._validation_keys) >= _MAX_VALIDATION_KEYS:
            self._validation_keys.clear()
        return self._validation_keys.setdefault(form, form)


@dataclass(frozen=True, slots=True)
class EnsembleSignature:
    """What clients see of an ensemble; `dims` are those of its outputs."""

    name: str
    version: int
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool


class TensorMemory(Protocol):
    """Where tensors of the ensemble itself lie."""

    def move_to_shared_memory(self, tensor: Tensor) -> None:
        """Put it where several models can read it. Raises HostError if there is no room."""

    def write_outputs(self, slots: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
        """Write outputs to where the client wants them; what stands against it."""

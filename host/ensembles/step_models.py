"""Whom a request to an ensemble has to do with: its face to clients, its members, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.errors import HostError
from host.inference.request import Tensor
from host.models.registry import LoadedModel

_MOST_FORMS = 32  # of a step's requests that are remembered


@dataclass(frozen=True, slots=True)
class Partner:
    """A model that runs a step, and the shapes of its inputs without batch dimension."""

    model: LoadedModel
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool
    _forms: dict[object, object] = field(default_factory=dict)

    def form_of(self, inputs: Sequence[Tensor]) -> object:
        """What requests of the step with these inputs share, as `InferRequest.form` wants it."""
        form = tuple([(t.name, t.datatype, len(t.data), *t.shape) for t in inputs])
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        return self._forms.setdefault(form, form)


@dataclass(frozen=True, slots=True)
class Face:
    """What clients see of an ensemble; `dims` are those of its outputs."""

    name: str
    version: int
    dims: Mapping[str, Sequence[int]]
    batches: bool
    decoupled: bool


class TensorMemory(Protocol):
    """Where tensors of the ensemble itself lie."""

    def share(self, tensor: Tensor) -> None:
        """Put it where several models can read it. Raises HostError if there is no room."""

    def deliver(self, slots: Mapping[str, object], outputs: list[Tensor]) -> HostError | None:
        """Write outputs to where the client wants them; what stands against it."""

"""The steps of an ensemble, which of them given outputs need, and the tensors between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from host.config.schema import ModelConfig
from host.ensembles.step_limits import ResponseCredit
from host.errors import invalid_argument
from host.inference.request import KnownShapes, Parameter, Tensor
from host.models.registry import LoadedModel
from host.repository.repository import qualified_name

_ROUTES = 64  # kept for each ensemble, as clients choose the outputs


@dataclass(frozen=True, slots=True, eq=False)
class EnsembleStep:
    """One step. `version` -1: the latest ready one.

    `inputs`: the ensemble's tensor for each input of the step model. `outputs`: the ensemble's
    tensor for each output of the step model.
    """

    index: int
    known: str
    """The qualified name of the step model."""
    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: Mapping[str, str]
    sources: frozenset[str]
    """The tensors that must be there before the step can start."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The steps that some outputs need, and how often each tensor is used."""

    inputs: tuple[str, ...]
    optional: frozenset[str]
    """Inputs of the ensemble that a request may leave out."""
    outputs: tuple[str, ...]
    steps: tuple[EnsembleStep, ...]
    users: Mapping[str, tuple[EnsembleStep, ...]]
    uses: Mapping[str, int]
    """Number of steps that use a tensor, plus one if it is a requested output."""


class EnsemblePlan:
    """The graph of one configuration that has passed its checks.

    Source: docs/reference/ensembles.md, "Checks of the configuration".
    """

    def __init__(self, config: ModelConfig) -> None:
        # A configuration may list an output twice; a response contains it once.
        self.outputs = tuple(dict.fromkeys(output.name for output in config.output))
        self.steps = tuple(
            EnsembleStep(
                index,
                qualified_name(step.model_namespace, step.model_name),
                step.model_name,
                step.model_version,
                tuple(sorted(step.input_map.items())),
                dict(step.output_map),
                frozenset(step.input_map.values()),
            )
            for index, step in enumerate(config.ensemble_scheduling.step)
        )
        self._optional = frozenset(entry.name for entry in config.input if entry.optional)
        self._makers = {name: step for step in self.steps for name in step.outputs.values()}
        self._route = lru_cache(_ROUTES)(self._find_route)

    def find_source(self, tensor: str) -> tuple[EnsembleStep, str] | None:
        """The step that makes a tensor, and the output of its model; None for an input."""
        step = self._makers.get(tensor)
        if step is None:
            return None
        return step, next(output for output, name in step.outputs.items() if name == tensor)

    def route(self, requested: Iterable[str]) -> Route:
        """The route to these outputs, or to all outputs if there are none."""
        return self._route(frozenset(requested) or frozenset(self.outputs))

    def _find_route(self, requested: frozenset[str]) -> Route:
        needed: set[int] = set()
        todo = list(requested)
        while todo:
            maker = self._makers.get(todo.pop())  # inputs of the ensemble have no step
            if maker is not None and maker.index not in needed:
                needed.add(maker.index)
                todo += maker.sources
        steps = tuple(step for step in self.steps if step.index in needed)
        users: dict[str, tuple[EnsembleStep, ...]] = {}
        for step in steps:
            for name in step.sources:
                users[name] = (*users.get(name, ()), step)
        uses = Counter({name: len(using) for name, using in users.items()})
        uses.update(requested)
        outputs = tuple(name for name in self.outputs if name in requested)
        inputs = tuple(name for name in uses if name not in self._makers)
        return Route(inputs, self._optional, outputs, steps, users, dict(uses))


_START, _END = 1, 2


_NAMES = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, slots=True)
class SequencePosition:
    """The sequence that a tensor belongs to, and its place there."""

    id: int | str
    flags: int
    own: bool = False
    """Whether the step model set it in its response."""

    def updated_by(self, parameters: Mapping[str, Parameter]) -> SequencePosition:
        """The position after the parameters of a response. Raises HostError INVALID_ARG.

        Source: docs/reference/ensembles.md, "Execution".
        """
        if parameters.keys().isdisjoint(_NAMES):
            return self
        changed = replace(self, own=True)
        if "sequence_id" in parameters:
            value = parameters["sequence_id"]
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise invalid_argument(
                    "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or"
                    " TRITONSERVER_PARAMETER_STRING"
                )
            changed = replace(changed, id=value)
        for name, flag in (("sequence_start", _START), ("sequence_end", _END)):
            if name in parameters:
                on = parameters[name]
                if not isinstance(on, bool):
                    raise invalid_argument(
                        f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL"
                    )
                changed = replace(changed, flags=(changed.flags & ~flag) | (flag if on else 0))
        return changed

    def to_parameters(self) -> dict[str, Parameter]:
        """The parameters of a response of the ensemble."""
        return {
            "sequence_id": self.id,
            "sequence_start": bool(self.flags & _START),
            "sequence_end": bool(self.flags & _END),
        }


@dataclass(slots=True, eq=False)
class EnsembleTensor:
    """A tensor of the ensemble; None if its step did not return it. `uses`: uses still to come.

    `batch_size`: of the request that computed it, 0 if that model does not batch.
    """

    tensor: Tensor | None
    batch_size: int
    correlation: SequencePosition
    uses: int
    credit: ResponseCredit | None = None

    def to_step_input(self, name: str, dims: Sequence[int], batches: bool) -> Tensor | None:
        """The tensor as input `name` of a model with shape `dims`. Copies no bytes.

        A batch dimension of one is added or removed where only one side has it
        (docs/reference/ensembles.md, "Execution").
        """
        tensor = self.tensor
        if tensor is None:
            return None
        shape = tensor.shape
        if batches and not self.batch_size:
            if _fit(shape, dims):
                shape = [1, *shape]
        elif not batches and self.batch_size == 1 and not _fit(shape, dims):
            shape = shape[1:]
        return Tensor(name, tensor.datatype, list(shape), tensor.data, tensor.owner)


def _fit(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(
        want in (-1, got) for want, got in zip(dims, shape, strict=True)
    )


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

"""The steps of an ensemble, and which of them given outputs need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from host.config.schema import ModelConfig
from host.repository.qualified_name import qualified_name

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

    Source: docs/reference/configuration-and-scheduling.md, "Checks of the configuration".
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

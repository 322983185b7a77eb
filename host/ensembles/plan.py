"""The steps of an ensemble, and which of them some outputs need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from host.config.schema import ModelConfig
from host.repository.qualified_name import qualified_name

_ROUTES = 64  # that are kept for each ensemble; clients choose which outputs they ask for


@dataclass(frozen=True, slots=True, eq=False)
class EnsembleStep:
    """One member at work. `version` -1 is the latest one that is ready.

    `inputs` are the member's, each with the ensemble's tensor that it gets; `outputs` are the
    ensemble's tensors by the member's names.
    """

    index: int
    known: str
    """The identity of its model."""
    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: Mapping[str, str]
    sources: frozenset[str]
    """The ensemble's tensors that must be there before it can start."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What is to be done for some outputs: the steps, and who uses each tensor how often."""

    inputs: tuple[str, ...]
    optional: frozenset[str]
    """The inputs of the ensemble whose steps go on if they are left out."""
    outputs: tuple[str, ...]
    steps: tuple[EnsembleStep, ...]
    users: Mapping[str, tuple[EnsembleStep, ...]]
    uses: Mapping[str, int]
    """By steps, and once more if it is asked for."""


class EnsemblePlan:
    """The graph of one configuration, which has passed the checks of configuration spec 6.1."""

    def __init__(self, config: ModelConfig) -> None:
        self.outputs: tuple[str, ...] = tuple(output.name for output in config.output)
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

    def route(self, requested: Iterable[str]) -> Route:
        """What these outputs need; all outputs if none is named. Other steps are left out."""
        return self._route(frozenset(requested) or frozenset(self.outputs))

    def _find_route(self, requested: frozenset[str]) -> Route:
        needed: set[int] = set()
        todo = list(requested)
        while todo:
            maker = self._makers.get(todo.pop())  # the ensemble's inputs have none
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

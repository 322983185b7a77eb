"""The CUDA graphs of a configuration, and the choice of a graph for a batch.

A graph replays a recorded run, for inputs of one size. A graph with a lower bound also serves
smaller inputs, padded with zeros (docs/reference/configuration-and-scheduling.md, "Messages
inside").
"""

from math import prod
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from stub.backends.batch import InvalidInput
from stub.backends.tensorrt.plan import Extent, Plan
from stub.backends.tensorrt.profiles import choose_profile
from stub.user_model import ModelFailure


class GraphSpec(NamedTuple):
    """A graph to record, for inputs of sizes `extents`, or down to `lower_bound` if that is set.

    `profile` is the optimization profile to record it with.
    """

    extents: Dict[str, Extent]
    profile: int
    lower_bound: Optional[Dict[str, Extent]] = None

    def covers(self, extents: Mapping[str, Extent]) -> bool:
        """Returns whether the graph can run a batch with such inputs."""
        if self.lower_bound is None:
            return extents == self.extents
        return all(
            len(extent) == len(self.extents[name])
            and all(
                low <= size <= high
                for low, size, high in zip(self.lower_bound[name], extent, self.extents[name])
            )
            for name, extent in extents.items()
        )


def graph_specs(config: Mapping[str, Any], plan: Plan, profiles: Sequence[int]) -> List[GraphSpec]:
    """Returns the graphs of `optimization.cuda`; by default, for batches of 1 and preferred sizes.

    Dimensions that a graph does not set get the optimum of the first profile. Engines with an
    implicit batch dimension have no graphs. Raises ModelFailure.
    """
    cuda = config.get("optimization", {}).get("cuda", {})
    if not cuda.get("graphs") or plan.implicit_max_batch:
        return []
    reader = _GraphSpecReader(config, plan, profiles)
    specs: Sequence[Mapping[str, Any]] = cuda.get("graph_spec", ())
    if not specs:
        specs = [{"batch_size": size} for size in _default_batch_sizes(config)]
    graphs: List[GraphSpec] = []
    for spec in specs:
        bound = spec.get("graph_lower_bound")
        lower_bound = None if bound is None else reader.extents(bound)
        extents = reader.extents(spec)
        graph = GraphSpec(extents, reader.profile_for(extents), lower_bound)
        if graph not in graphs:
            graphs.append(graph)
    return graphs


def _default_batch_sizes(config: Mapping[str, Any]) -> List[int]:
    max_batch_size = config.get("max_batch_size", 0)
    if not max_batch_size:
        return [0]
    preferred = config.get("dynamic_batching", {}).get("preferred_batch_size", ())
    return sorted(size for size in {1, *preferred} if size <= max_batch_size)


def choose_graph(graphs: Sequence[GraphSpec], extents: Mapping[str, Extent]) -> Optional[GraphSpec]:
    """Returns the smallest graph that can run such a batch; None if there is none."""
    fitting = [graph for graph in graphs if graph.covers(extents)]
    return min(fitting, key=_volume) if fitting else None


def _volume(graph: GraphSpec) -> int:
    return sum(prod(extent) for extent in graph.extents.values())


class _GraphSpecReader:
    def __init__(self, config: Mapping[str, Any], plan: Plan, profiles: Sequence[int]) -> None:
        self._model: str = config["name"]
        self._max_batch_size: int = config.get("max_batch_size", 0)
        self._plan = plan
        self._profiles = profiles

    def profile_for(self, extents: Mapping[str, Extent]) -> int:
        try:
            return choose_profile(self._plan, self._profiles, extents)
        except InvalidInput as problem:
            raise self._invalid_spec(str(problem)) from problem

    def extents(self, spec: Mapping[str, Any]) -> Dict[str, Extent]:
        size = int(spec.get("batch_size", 0))
        if (size > 0) != (self._max_batch_size > 0) or not 0 <= size <= self._max_batch_size:
            fits = (
                f"from 1 to {self._max_batch_size}"
                if self._max_batch_size
                else "0, as there is no max_batch_size"
            )
            raise self._invalid_spec(f"its batch_size must be {fits}, got {size}")
        given: Mapping[str, Mapping[str, Any]] = spec.get("input", {})
        unknown = sorted(set(given) - {each.name for each in self._plan.inputs})
        if unknown:
            raise self._invalid_spec(f"the engine has no input '{unknown[0]}'")
        found: Dict[str, Extent] = {}
        for tensor in self._plan.inputs:
            best = tensor.ranges[self._profiles[0]].opt if tensor.ranges else tensor.shape
            rest = best[1:] if self._max_batch_size else best
            if tensor.name in given:
                named = tuple(int(each) for each in given[tensor.name]["dim"])
                if len(named) != len(rest):
                    raise self._invalid_spec(
                        f"its input '{tensor.name}' must have {len(rest)} dimensions, got"
                        f" {len(named)}"
                    )
                rest = named
            found[tensor.name] = (size, *rest) if self._max_batch_size else rest
        return found

    def _invalid_spec(self, why: str) -> ModelFailure:
        return ModelFailure(
            f"model '{self._model}' cannot be loaded: a graph_spec of optimization.cuda does not"
            f" fit: {why}"
        )

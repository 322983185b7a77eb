"""A plan as plain data: its tensors, profiles and graphs, and checks of a configuration against it.

Source: docs/reference/configuration-and-scheduling.md, "Messages inside".
"""

from math import prod
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from pb_utils._datatypes import CONFIG_CODES, STORAGE
from pb_utils._model_code import declared_shape
from stub.backends.batch import InvalidInput
from stub.backends.model_contract import (
    ModelContract,
    ModelTensor,
    add_tensors,
    config_entry,
    format_shape,
)
from stub.user_model import ModelFailure

STORAGE_DTYPES = {name: STORAGE[code] for name, code in CONFIG_CODES.items()}
"""The numpy type of each data type of a configuration; 16-bit integers for BF16."""

Extent = Tuple[int, ...]
"""The shape of an input, or the values of a shape tensor: what optimization profiles limit."""


class ProfileRange(NamedTuple):
    """The limits that an optimization profile sets for one input, and its optimum."""

    min: Extent
    opt: Extent
    max: Extent

    def contains(self, extent: Sequence[int]) -> bool:
        """Returns whether every size lies within the limits."""
        return len(extent) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, extent, self.max)
        )


class Layout(NamedTuple):
    """The memory layout of elements: vectors of `components`, along dimension `vector_axis`.

    The last vector is padded. `linear`: the layout of an ordinary array.
    """

    linear: bool = True
    vector_axis: int = -1
    components: int = 1
    description: str = "linear"

    def elements(self, shape: Sequence[int]) -> int:
        """Returns the number of elements in memory, with padding, for a tensor of this shape."""
        count = 1
        for index, size in enumerate(shape):
            if index == self.vector_axis:
                size = -(-size // self.components) * self.components
            count *= size
        return count


class PlanTensor(NamedTuple):
    """One input or output. `shape` is the engine's, with -1 for dynamic dimensions.

    `is_shape_tensor`: the engine computes shapes from its values, or outputs a shape in them.
    `on_host`: the engine reads or writes it in the CPU's memory. `ranges`: the limits of each
    profile, for an input.
    """

    name: str
    is_input: bool
    data_type: str
    shape: Extent
    ranges: Tuple[ProfileRange, ...] = ()
    is_shape_tensor: bool = False
    on_host: bool = False
    layout: Layout = Layout()

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of memory that the tensor needs with this shape."""
        return self.layout.elements(shape) * STORAGE_DTYPES[self.data_type].itemsize


class Plan(NamedTuple):
    """A whole engine.

    `implicit_max_batch`: the maximum batch size if the shapes lack the batch dimension, as in
    engines of TensorRT 9 and earlier; else 0.
    """

    tensors: Tuple[PlanTensor, ...]
    profiles: int = 1
    implicit_max_batch: int = 0

    @property
    def inputs(self) -> List[PlanTensor]:
        """The inputs in the engine's order."""
        return [tensor for tensor in self.tensors if tensor.is_input]

    @property
    def outputs(self) -> List[PlanTensor]:
        """The outputs in the engine's order."""
        return [tensor for tensor in self.tensors if not tensor.is_input]

    def max_batch(self, profiles: Sequence[int]) -> int:
        """Returns the largest batch size of these profiles; 0 without a batch dimension.

        An engine has a batch dimension if the first dimension of all tensors is dynamic, apart from
        shape tensors.
        """
        if self.implicit_max_batch:
            return self.implicit_max_batch
        batched = [tensor for tensor in self.tensors if not tensor.is_shape_tensor]
        if not all(tensor.shape[:1] == (-1,) for tensor in batched):
            return 0
        inputs = [tensor for tensor in batched if tensor.is_input]
        if not inputs:
            return 0
        return max(min(tensor.ranges[profile].max[0] for tensor in inputs) for profile in profiles)


def model_tensor(plan: Plan, tensor: PlanTensor) -> ModelTensor:
    """Returns the tensor as configurations describe it, with an implicit batch dimension."""
    shape = list(tensor.shape)
    if plan.implicit_max_batch:
        shape.insert(0, -1)
    return ModelTensor(tensor.name, tensor.data_type, shape)


def instance_group_of(config: Mapping[str, Any], instance: str) -> Mapping[str, Any]:
    """Returns the group of an instance named `<group>_<number>`; empty if there is none."""
    name = instance.rpartition("_")[0]
    for group in config.get("instance_group", ()):
        if group["name"] == name:
            found: Mapping[str, Any] = group
            return found
    return {}


def profiles_of_group(model: str, group: Mapping[str, Any], plan: Plan) -> List[int]:
    """Returns the profiles in the group's `profile`; by default the first. Raises ModelFailure."""
    chosen = sorted({int(text) for text in group.get("profile", ())}) or [0]
    if chosen[-1] >= plan.profiles:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: its instance group '{group['name']}' names the"
            f" optimization profile {chosen[-1]}, and the engine has {plan.profiles}, counted"
            " from 0"
        )
    return chosen


def choose_profile(plan: Plan, profiles: Sequence[int], extents: Mapping[str, Extent]) -> int:
    """Returns the profile that allows all inputs and is optimal for the nearest sizes.

    `extents` has one entry for every input. Raises InvalidInput if no profile allows them.
    """
    distances: Dict[int, int] = {}
    for profile in profiles:
        ranges = {each.name: each.ranges[profile] for each in plan.inputs if each.ranges}
        if all(ranges[name].contains(extents[name]) for name in ranges):
            distances[profile] = sum(
                abs(size - best)
                for name, each in ranges.items()
                for size, best in zip(extents[name], each.opt)
            )
    if not distances:
        raise InvalidInput(_no_profile_message(plan, profiles, extents))
    return min(distances, key=lambda profile: (distances[profile], profile))


def _no_profile_message(plan: Plan, profiles: Sequence[int], extents: Mapping[str, Extent]) -> str:
    """Returns the error for the first input that no profile allows, or for the combination."""
    for tensor in plan.inputs:
        ranges = [tensor.ranges[profile] for profile in profiles] if tensor.ranges else []
        extent = extents[tensor.name]
        if ranges and not any(each.contains(extent) for each in ranges):
            what = "values" if tensor.is_shape_tensor else "shape"
            taken = ", ".join(
                f"{profile}: {format_shape(each.min)} to {format_shape(each.max)}"
                for profile, each in zip(profiles, ranges)
            )
            return (
                f"input '{tensor.name}' has the {what} {format_shape(extent)}, which no"
                f" optimization profile of this instance takes; they take {taken}"
            )
    inputs = ", ".join(f"'{name}' {format_shape(extent)}" for name, extent in extents.items())
    return f"no optimization profile of this instance takes these inputs together: {inputs}"


class GraphSpec(NamedTuple):
    """A graph, which replays a recorded run for inputs of the sizes `extents`.

    With `lower_bound` it also serves smaller inputs, down to these sizes, padded with zeros.

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


def check_config(
    contract: ModelContract, max_batch_size: int, plan: Plan, profiles: Sequence[int]
) -> None:
    """Checks that the plan has what the configuration declares. Raises ModelFailure.

    `max_batch_size` is the configuration's max_batch_size.
    """
    largest = plan.max_batch(profiles)
    if max_batch_size > 0 and max_batch_size > largest:
        engine = f"takes at most {largest}" if largest else "has no dynamic batch dimension"
        raise ModelFailure(
            f"unable to load model '{contract.model}', configuration specifies max_batch_size"
            f" {max_batch_size}, and the engine {engine} with the optimization profiles"
            f" {', '.join(map(str, profiles))}"
        )
    if plan.implicit_max_batch and not max_batch_size:
        raise ModelFailure(
            f"unable to load model '{contract.model}', configuration specifies max_batch_size 0,"
            f" and the engine has an implicit batch dimension: set it, to at most"
            f" {plan.implicit_max_batch}"
        )
    for kind, expected, tensors in (
        ("input", contract.inputs, plan.inputs),
        ("output", contract.outputs, plan.outputs),
    ):
        for tensor in tensors:
            if tensor.name not in expected:
                continue
            wanted = expected[tensor.name]
            where = f"{kind} '{tensor.name}'"
            said, has = wanted.is_shape_tensor, tensor.is_shape_tensor
            if said != has:
                raise _flag_error(contract.model, where, "is_shape_tensor", has, "a shape tensor")
            said, has = wanted.is_non_linear, not tensor.layout.linear
            if said != has:
                what = f"of a non-linear format ({tensor.layout.description})"
                raise _flag_error(contract.model, where, "is_non_linear_format_io", has, what)
    contract.check_model(
        [model_tensor(plan, tensor) for tensor in plan.inputs],
        [model_tensor(plan, tensor) for tensor in plan.outputs],
    )


def _flag_error(model: str, where: str, flag: str, needed: bool, what: str) -> ModelFailure:
    said, has = ("does not set", "is") if needed else ("sets", "is not")
    return ModelFailure(
        f"unable to load model '{model}', configuration {said} {flag} for {where}, which {has}"
        f" {what} in the engine"
    )


def complete_config(config: Dict[str, Any], plan: Plan, profiles: Sequence[int]) -> None:
    """Adds tensors, batch size and scheduler to `config`, in place. Raises ModelFailure.

    See docs/reference/configuration-and-scheduling.md, "From the directory to a served model".
    """
    model, size = config["name"], config.get("max_batch_size", 0)
    largest = plan.max_batch(profiles)
    if size > largest:
        raise ModelFailure(
            f"autofill failed for model '{model}': configuration specified max-batch {size} but"
            f" TensorRT engine only supports max-batch {largest}"
        )
    if not size and largest and not _has_full_shapes(config, plan):
        size = config["max_batch_size"] = largest
    add_tensors(
        config,
        [_config_entry(plan, tensor, size > 0) for tensor in plan.inputs],
        [_config_entry(plan, tensor, size > 0) for tensor in plan.outputs],
    )


def _has_full_shapes(config: Mapping[str, Any], plan: Plan) -> bool:
    """Returns whether configured tensors include the batch dimension in their dims."""
    ranks = {tensor.name: len(model_tensor(plan, tensor).shape or ()) for tensor in plan.tensors}
    entries: List[Mapping[str, Any]] = [*config.get("input", ()), *config.get("output", ())]
    marked = [each for each in entries if each.get("is_shape_tensor")]
    plain = [each for each in entries if each not in marked and each["name"] in ranks]
    return any(len(declared_shape(each, 0)) == ranks[each["name"]] for each in plain)


def _config_entry(plan: Plan, tensor: PlanTensor, batches: bool) -> Dict[str, Any]:
    entry = config_entry(model_tensor(plan, tensor), batches and not tensor.is_shape_tensor)
    if tensor.is_shape_tensor:
        entry["is_shape_tensor"] = True
        if batches and tensor.shape and tensor.shape[0] > 0:
            entry["dims"][0] -= 1  # the first value is the batch size
    if not tensor.layout.linear:
        entry["is_non_linear_format_io"] = True
    return entry

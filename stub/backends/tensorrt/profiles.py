"""The optimization profiles of an instance, and the choice of a profile for a batch."""

from typing import Any, Dict, List, Mapping, Sequence

from stub.backends.batch import InvalidInput
from stub.backends.contract import format_shape
from stub.backends.tensorrt.plan import Extent, Plan
from stub.user_model import ModelFailure


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

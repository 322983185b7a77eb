"""Instance groups: fills in what they leave out, checks them, and lists their instances."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from host.config.findings import Finding, Findings
from host.config.schema import ConfigPart, ModelConfig, is_ensemble, pb
from host.errors import ErrorCode

Kind: TypeAlias = Literal["CPU", "GPU", "MODEL"]

_Group = pb.ModelInstanceGroup
_KINDS: dict[int, Kind] = {
    _Group.KIND_CPU: "CPU",
    _Group.KIND_GPU: "GPU",
    _Group.KIND_MODEL: "MODEL",
}
_TWO_ON_CPU = ("tensorflow", "onnxruntime")
_MIN_CAPABILITY = 6.0
_ADVICE = (
    "set KIND_CPU, or KIND_AUTO to use a GPU only if there is one; or start the server on a machine"
    " with a GPU of the required compute capability and NVIDIA's driver"
)


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """A model instance to create.

    `device_id` is the GPU, or 0 if the instance does not run on a GPU. `group` is the index of its
    instance group. Instances of a group on different GPUs have the same names.
    """

    name: str
    kind: Kind
    device_id: int
    group: int
    passive: bool = False


def normalise_instance_groups(config: ModelConfig, gpus: Sequence[int] = ()) -> None:
    """Fills in name, kind and count of every group; `gpus` are the usable GPU ids.

    The rules are in docs/reference/scheduling.md, "Instance groups".
    """
    if is_ensemble(config):
        return
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == _Group.KIND_AUTO:
            on_gpu = bool(gpus) and set(group.gpus) <= set(gpus)
            group.kind = _Group.KIND_GPU if on_gpu else _Group.KIND_CPU
        if group.count < 1:
            on_cpu = group.kind == _Group.KIND_CPU
            group.count = 2 if on_cpu and config.backend in _TWO_ON_CPU else 1
        if group.kind == _Group.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)


def use_cpu_without_gpus(config: ModelConfig) -> bool:
    """Changes instance groups of KIND_GPU to KIND_CPU; returns whether there were any."""
    groups = [group for group in config.instance_group if group.kind == _Group.KIND_GPU]
    for group in groups:
        group.kind = _Group.KIND_CPU
        group.ClearField("gpus")
    return bool(groups)


def check_instance_groups(
    config: ModelConfig, gpus: Sequence[int] = (), least_capability: float = _MIN_CAPABILITY
) -> Findings:
    """Checks normalised instance groups (docs/reference/scheduling.md, "Instance
    groups").

    `gpus` are the ids of GPUs that have at least the compute capability `least_capability`.
    """
    if is_ensemble(config):
        return
    if not config.instance_group:
        yield Finding(
            f"must specify one or more 'instance group's for {config.name}", "instance_group"
        )
    for index, group in enumerate(config.instance_group):
        path = f"instance_group[{index}]"
        owner = f"instance group {group.name} of model {config.name}"
        yield from _check_kind(group, gpus, least_capability, owner, path)
        yield from _check_profiles(group, config.platform, owner, path)


def _check_kind(
    group: ConfigPart, gpus: Sequence[int], least_capability: float, owner: str, path: str
) -> Findings:
    if group.kind == _Group.KIND_AUTO:
        yield Finding(f"{owner} has unexpected kind KIND_AUTO", f"{path}.kind", ErrorCode.INTERNAL)
    elif group.kind != _Group.KIND_GPU:
        if group.gpus:
            kind = _Group.Kind.Name(group.kind)
            yield Finding(f"{owner} has kind {kind} but specifies one or more GPUs", f"{path}.gpus")
    elif not gpus and not group.gpus:
        yield Finding(
            f"{owner} has kind KIND_GPU but server does not support GPUs",
            f"{path}.kind",
            advice=_ADVICE,
        )
    else:
        for index, gpu in enumerate(group.gpus):
            if gpu not in gpus:
                usable = ", ".join(map(str, gpus))
                yield Finding(
                    f"{owner} specifies invalid or unsupported gpu id {gpu}. GPUs with at least "
                    "the minimum required CUDA compute compatibility of "
                    f"{least_capability:.6f} are: {usable}",
                    f"{path}.gpus[{index}]",
                    advice="" if gpus else _ADVICE,
                )


def _check_profiles(group: ConfigPart, platform: str, owner: str, path: str) -> Findings:
    prefix = f"{owner} and platform {platform}"
    if group.profile and platform != "tensorrt_plan":
        # Triton's text has no space here.
        yield Finding(
            f"{prefix}specifies profile field which is only supported for TensorRT models",
            f"{path}.profile",
        )
    for index, profile in enumerate(group.profile):
        if not re.fullmatch(r"[0-9]+", profile):
            yield Finding(
                f"{prefix} specifies invalid profile {profile}. The field should contain the "
                "string representation of a non-negative integer.",
                f"{path}.profile[{index}]",
            )


def instance_specs(config: ModelConfig) -> list[InstanceSpec]:
    """The instances of the normalised groups, in the order of creation."""
    return [
        InstanceSpec(f"{group.name}_{number}", kind, device, index, group.passive)
        for index, group in enumerate(config.instance_group)
        for kind in (_KINDS[group.kind],)
        for number in range(group.count)
        for device in (group.gpus if kind == "GPU" else (0,))
    ]

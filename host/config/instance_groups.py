"""Instance groups: the default ones, the checks, and the instances that they ask for."""

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
_CPU_DEFAULT_COUNT = ("tensorflow", "onnxruntime")
_LEAST_CAPABILITY = 6.0
_ADVICE = (
    "set KIND_CPU, or KIND_AUTO for a GPU where there is one; or start the server where NVIDIA's"
    " driver shows it a GPU that is good enough"
)


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance to create. `device_id` is 0 unless it runs on a GPU.

    `group` is the index of its instance group. All GPUs of a group share the same instance names.
    """

    name: str
    kind: Kind
    device_id: int
    group: int
    passive: bool = False


def normalise_instance_groups(config: ModelConfig, gpus: Sequence[int] = ()) -> None:
    """Give every group a name, a kind and a count (configuration spec 3); `gpus` are the usable."""
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
            two = group.kind == _Group.KIND_CPU and config.backend in _CPU_DEFAULT_COUNT
            group.count = 2 if two else 1
        if group.kind == _Group.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)


def check_instance_groups(
    config: ModelConfig, gpus: Sequence[int] = (), least_capability: float = _LEAST_CAPABILITY
) -> Findings:
    """What is wrong with the normalised groups (configuration spec 3).

    `gpus` are the usable ones: those of at least that compute capability.
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
    elif not gpus:
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
                )


def _check_profiles(group: ConfigPart, platform: str, owner: str, path: str) -> Findings:
    prefix = f"{owner} and platform {platform}"
    if group.profile and platform != "tensorrt_plan":
        # The missing space is part of the text that clients may match.
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
    """The instances that the normalised groups ask for, in the order of their creation."""
    return [
        InstanceSpec(f"{group.name}_{number}", kind, device, index, group.passive)
        for index, group in enumerate(config.instance_group)
        for kind in (_KINDS[group.kind],)
        for number in range(group.count)
        for device in (group.gpus if kind == "GPU" else (0,))
    ]

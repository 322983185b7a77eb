"""Instance groups on several GPUs, as replicas with one GPU each hold them."""

from __future__ import annotations

from host.config.schema import ConfigPart, ModelConfig, pb

_Group = pb.ModelInstanceGroup


def list_equal_gpus(config: ModelConfig) -> list[int]:
    """The GPUs that the groups name, if each has the same instances; otherwise none.

    Groups of another kind, without numbers or with wrong ones, cannot be divided among GPUs.
    """
    groups = config.instance_group
    kinds = (_Group.KIND_GPU, _Group.KIND_AUTO)
    if any(group.kind not in kinds or min(group.gpus, default=-1) < 0 for group in groups):
        return []
    gpus = sorted({gpu for group in groups for gpu in group.gpus})
    instances = [_groups_of(config, gpu) for gpu in gpus]
    for group in (each for one in instances for each in one):
        group.ClearField("name")
    return gpus if all(one == instances[0] for one in instances) else []


def keep_one_gpu(config: ModelConfig) -> None:
    """Leaves the groups of one GPU, which becomes number 0; no change unless all GPUs are equal."""
    gpus = list_equal_gpus(config)
    if gpus:
        kept = _groups_of(config, gpus[0])
        config.ClearField("instance_group")
        config.instance_group.extend(kept)


def _groups_of(config: ModelConfig, gpu: int) -> list[ConfigPart]:
    """Copies of the groups with a GPU, on GPU 0 instead."""
    kept = []
    for group in config.instance_group:
        if gpu in group.gpus:
            copied = _Group()
            copied.CopyFrom(group)
            copied.gpus[:] = [0] * group.gpus[:].count(gpu)  # instances for each mention
            kept.append(copied)
    return kept

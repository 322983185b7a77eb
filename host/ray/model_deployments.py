"""The deployments of an application with one deployment per model, and their options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from host.config.model_config import read_unchecked_config
from host.config.schema import ConfigPart, ModelConfig, is_ensemble, new_config, pb
from host.errors import HostError
from host.options.options import Options
from host.ray.deployment_options import (
    DEPLOYMENT,
    LEAST_ONGOING,
    ROUTER,
    STOP_MARGIN,
    count_gpus,
    count_instances,
    count_ongoing_requests,
    scan_models,
    with_policy,
)

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


_INGRESS_ONGOING = 1000
_CPUS_PER_INSTANCE = 0.1
_ENSEMBLE_ONGOING = 256


@dataclass(frozen=True)
class ModelDeployment:
    """The deployment of one model: its name, and its options in the form of Ray Serve's YAML."""

    model: str
    name: str
    settings: dict[str, Any]
    ensemble: bool = False


def deployment_name(model: str) -> str:
    """The name of a model's deployment."""
    return f"model-{model}"


def ingress_settings(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the ingress; `given` come first."""
    return with_policy(
        {
            "max_ongoing_requests": _INGRESS_ONGOING,
            "graceful_shutdown_timeout_s": options.exit_timeout_secs + STOP_MARGIN,
            "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
            **given,
        }
    )


def model_deployments(
    options: Options,
    given: Mapping[str, Mapping[str, Any]],
    for_all: Mapping[str, Any] | None = None,
) -> list[ModelDeployment]:
    """A deployment for each model of `load_model`, by default for each in the repository. Blocks.

    `given`: options by model, which come before those that follow from its configuration; "" is the
    ingress. `for_all`: those of models that have none there. Raises ValueError for a model that is
    missing, or whose configuration cannot be read.
    """
    if options.model_namespacing:
        raise ValueError("model_namespacing: each model needs a name of its own as a deployment")
    found = []
    try:
        with scan_models(options) as directories:
            for name in _chosen_models(directories, options, given):
                try:
                    directories[name].check()
                    config = read_unchecked_config(
                        directories[name].path,
                        options.model_config_name or None,
                        options.template_variables,
                    )
                except HostError as error:
                    raise ValueError(f"model '{name}': {error.message}") from None
                config.name = name
                settings = model_settings(config, options, given.get(name, for_all or {}))
                found.append(
                    ModelDeployment(name, deployment_name(name), settings, is_ensemble(config))
                )
    except HostError as error:
        raise ValueError(error.message) from None
    return found


def _chosen_models(known: Collection[str], options: Options, given: Collection[str]) -> list[str]:
    """The models that are deployed. Raises ValueError for one that is not known."""
    chosen = list(options.load_model)
    names = list(known) if not chosen or "*" in chosen else chosen
    for name in (*names, *filter(None, given)):
        if name not in known:
            raise ValueError(f"model '{name}' is not in the repository")
    return sorted(set(names))


def model_settings(
    config: ModelConfig, options: Options, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of a model's deployment; `given` come first.

    There is a replica for each GPU that the instance groups name, if these GPUs have the same
    instances and `given` leaves each replica one GPU or a part of one. Otherwise a replica has all
    instances, and the GPUs up to the highest number; one GPU if a group of KIND_GPU names none.
    """
    settings: dict[str, Any] = {
        "graceful_shutdown_timeout_s": options.exit_timeout_secs + STOP_MARGIN
    }
    if is_ensemble(config):
        settings["max_ongoing_requests"] = _ENSEMBLE_ONGOING
        settings["ray_actor_options"] = {"num_cpus": _CPUS_PER_INSTANCE, "num_gpus": 0}
        return with_policy({**settings, **given})
    gpus = list_equal_gpus(config) if _leaves_one_gpu(given) else []
    if gpus:
        whole, config = config, new_config()
        config.CopyFrom(whole)
        keep_one_gpu(config)
        if "autoscaling_config" not in given:  # Ray refuses both
            settings["num_replicas"] = len(gpus)
    settings["max_ongoing_requests"] = max(LEAST_ONGOING, count_ongoing_requests(config))
    settings["ray_actor_options"] = {
        "num_cpus": round(_CPUS_PER_INSTANCE * count_instances(config), 3),
        "num_gpus": count_gpus(config),
    }
    if config.HasField("sequence_batching"):
        settings["request_router_config"] = ROUTER
    return with_policy({**settings, **given})


def _leaves_one_gpu(given: Mapping[str, Any]) -> bool:
    """Whether a replica may have a single GPU, or a part of one."""
    options = given.get("ray_actor_options")
    return options is None or 0 < (options.get("num_gpus") or 0) <= 1


INGRESS = DEPLOYMENT
"""The name of the deployment that clients reach."""

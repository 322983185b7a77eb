"""What models need of Ray Serve, and the options of servers and deployments that follow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from host.config.model_config import read_unchecked_config
from host.config.schema import ModelConfig
from host.errors import HostError
from host.options.command_line import parse
from host.options.flags import SWITCH
from host.options.options import Options, UsageError
from host.options.server_flags import FLAGS
from host.repository.model_directory import ModelDirectory
from host.repository.open_repository import scan_now

_SWITCHES = {flag.field for flag in FLAGS if flag.kind is SWITCH}
_DEFAULTS = {
    "allow_grpc": False,
    "allow_http": False,
    "allow_metrics": False,
    "busy_poll": False,  # replicas share CPUs, and Ray's threads share the interpreter of each
}


def read_options(arguments: Mapping[str, Any]) -> Options:
    """The options of a server without ports and busy polling, unless the arguments say otherwise.

    Raises ValueError, also for options that cannot work in one of several replicas.
    """
    flags = [
        flag
        for name, value in {**_DEFAULTS, **arguments}.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
        for flag in _flag(name, one)
    ]
    try:
        options = parse(flags)
    except UsageError as error:
        raise ValueError(f"{error.detail.strip()} {error.advice.strip()}".strip()) from None
    _check(options)
    return options


def _flag(name: str, value: object) -> list[str]:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if name in _SWITCHES:
        return [f"--{name.replace('_', '-')}"] if text == "true" else []
    return [f"--{name.replace('_', '-')}={text}"]


def _check(options: Options) -> None:
    if options.allow_client_shm:
        raise ValueError(
            "allow_client_shm: clients of a Ray cluster reach any replica, on any node, and shared"
            " memory belongs to one machine; send tensors in the requests"
        )
    if options.cache_settings is not None and options.cache_settings[0] == "local":
        raise ValueError(
            "cache_config: each replica would have a local cache of its own, with other contents;"
            " use a Redis server: cache_config=redis,host=HOST"
        )
    if options.frontend_count:
        raise ValueError(
            "frontend_processes: the proxies of Ray Serve take their place; leave it out"
        )
    if options.debug_model or options.dev:
        raise ValueError("dev and debug_model need a terminal, and a replica has none")


LEAST_ONGOING = 32
_BATCHES_PER_INSTANCE = 2  # one runs, and one waits


@dataclass
class ModelRequirements:
    """What one server with all models of a repository needs.

    Attributes:
        models: The names of the models.
        ongoing_requests: Requests that keep all instances busy, with a full batch waiting for each.
        gpus: GPUs that instance groups ask for; one for groups of KIND_GPU that name none.
        sequence_models: Models with sequence batching.
        unreadable: Models whose configuration cannot be read, with the reason.
    """

    models: list[str] = field(default_factory=list)
    ongoing_requests: int = 0
    gpus: int = 0
    sequence_models: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


@contextmanager
def scan_models(options: Options) -> Iterator[Mapping[str, ModelDirectory]]:
    """The models of the repositories, whose configuration files can be read meanwhile. Blocks.

    Raises HostError.
    """
    places, settings = options.model_repository, options.mirror_settings
    with scan_now(places, options.model_namespacing, settings) as scan:
        yield scan.models


def read_requirements(options: Options) -> ModelRequirements:
    """Reads the configurations of all models. Blocks. Raises ValueError without a repository.

    A model that completes its configuration as it runs counts with what its file says.
    """
    found = ModelRequirements()
    ongoing = 0
    variables = options.template_variables
    try:
        with scan_models(options) as models:
            for name, directory in models.items():
                found.models.append(name)
                try:
                    ongoing += _add_model(
                        found, directory, options.model_config_name or None, variables
                    )
                except HostError as error:
                    found.unreadable[name] = error.message
    except HostError as error:
        raise ValueError(error.message) from None
    found.ongoing_requests = max(LEAST_ONGOING, ongoing)
    return found


def _add_model(
    found: ModelRequirements,
    directory: ModelDirectory,
    config_name: str | None,
    variables: Mapping[str, str] | None,
) -> int:
    """Adds a model; returns its share of the ongoing requests. Raises HostError."""
    directory.check()
    config = read_unchecked_config(directory.path, config_name, variables)
    if config.HasField("sequence_batching"):
        found.sequence_models.append(directory.name)
    found.gpus = max(found.gpus, count_gpus(config))
    return count_ongoing_requests(config)


def count_instances(config: ModelConfig) -> int:
    """The instances of a model, without the GPUs of this machine: replicas may run on others."""
    groups = config.instance_group
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups) or 1


def count_ongoing_requests(config: ModelConfig) -> int:
    """Requests that keep all instances of a model busy, with a full batch waiting for each."""
    return _BATCHES_PER_INSTANCE * count_instances(config) * max(1, int(config.max_batch_size))


def count_gpus(config: ModelConfig) -> int:
    """The GPUs that a model needs, whose numbers begin at 0 in a replica.

    Those up to the highest number that a group names; one for groups of KIND_GPU that name none.
    """
    groups = config.instance_group
    named = [gpu + 1 for group in groups for gpu in group.gpus]
    return max(named, default=int(any(group.kind == group.KIND_GPU for group in groups)))


DEPLOYMENT = "pbhost"
"""The name of the deployment."""

POLICY = {"policy_function": "pbhost.host.ray.autoscaling:choose_replicas"}
ROUTER = {
    "request_router_class": "pbhost.host.ray.sequence_router.SequenceRouter",
    "request_router_kwargs": {"num_fallback_replicas": 0},
}

STOP_MARGIN = 10.0  # seconds of a replica's stop beside the exit timeout of its server


def behind_haproxy() -> bool:
    """Whether HAProxy takes the place of Ray Serve's own proxies, in this cluster."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def derive_options(
    options: Options, found: ModelRequirements, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All options, in the form of Ray Serve's YAML; `given` come first."""
    derived: dict[str, Any] = {
        "max_ongoing_requests": found.ongoing_requests,
        "graceful_shutdown_timeout_s": options.exit_timeout_secs + STOP_MARGIN,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": found.gpus},
        "logging_config": {"enable_access_log": False},  # a line for each request is slow
    }
    if found.sequence_models and not behind_haproxy():
        derived["request_router_config"] = ROUTER  # HAProxy has no routers, and Ray refuses one
    return with_policy({**derived, **given})


def with_policy(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of a deployment, whose autoscaling, if any, knows the queues of models."""
    scaling = settings.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        settings["autoscaling_config"] = {"policy": POLICY, **scaling}
    return settings

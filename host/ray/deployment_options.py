"""The options of a deployment that follow from the models and the flags of its servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from host.options.options import Options
from host.ray.requirements import ModelRequirements

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
    derived.update(given)
    scaling = derived.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        derived["autoscaling_config"] = {"policy": POLICY, **scaling}
    return derived

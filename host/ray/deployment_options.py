"""The options of a deployment that follow from the models and the flags of its servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.options.options import Options
from host.ray.requirements import ModelRequirements

DEPLOYMENT = "pbhost"
"""The name of the deployment."""

POLICY = {"policy_function": "host.ray.autoscaling:choose_replicas"}
ROUTER = {
    "request_router_class": "host.ray.sequence_router.SequenceRouter",
    "request_router_kwargs": {"num_fallback_replicas": 0},
}

STOP_MARGIN = 10.0  # seconds of a replica's stop beside the exit timeout of its server


def derive_options(
    options: Options, found: ModelRequirements, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All options, in the form of Ray Serve's YAML; `given` come first."""
    derived: dict[str, Any] = {
        "max_ongoing_requests": found.ongoing_requests,
        "graceful_shutdown_timeout_s": options.exit_timeout_secs + STOP_MARGIN,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": found.gpus},
    }
    if found.sequence_models:
        derived["request_router_config"] = ROUTER
    derived.update(given)
    scaling = derived.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        derived["autoscaling_config"] = {"policy": POLICY, **scaling}
    return derived

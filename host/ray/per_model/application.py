"""The application for Ray Serve with one deployment for each model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from host.ray.arguments import read_options
from host.ray.per_model.connection import LOAD_SECONDS
from host.ray.per_model.deployments import INGRESS, ingress_settings, model_deployments
from host.ray.per_model.replicas import Ingress, ModelReplica


def model_apps(args: Mapping[str, Any]) -> serve.Application:
    """The application of a model repository with one deployment per model, and one ingress.

    For `serve run pbhost.ray:model_apps` and its YAML. `args`: the flags of `pbhost serve` with `_`
    instead of `-`, and `deployments`, options of Ray Serve by model; "" is the ingress.
    `load_model` selects the models; without it, all of the repository have a deployment.

    Raises ValueError for a wrong flag, a missing model, or a configuration that cannot be read.
    """
    arguments = dict(args)
    given = arguments.pop("deployments", {})
    options = read_options(arguments)
    parts = model_deployments(options, given)
    names = {part.model: part.name for part in parts}
    arguments["model_control_mode"] = "explicit"
    bound = []
    for part in parts:
        own = {**arguments, "load_model": [part.model]}
        if part.ensemble:  # it starts when the deployments of its steps have started
            own["on_demand_timeout_secs"] = max(options.on_demand_timeout_secs, LOAD_SECONDS)
        deployment = serve.deployment(ModelReplica, name=part.name).options(**part.settings)
        bound.append(deployment.bind(own, part.model, names))
    arguments.pop("load_model", None)
    settings = ingress_settings(options, given.get("", {}))
    ingress = serve.deployment(Ingress, name=INGRESS)
    return ingress.options(**settings).bind(arguments, names, *bound)

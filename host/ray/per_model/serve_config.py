"""The configuration file of Ray Serve for an application with one deployment per model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from host.ray.arguments import read_options
from host.ray.per_model.deployments import INGRESS, ingress_settings, model_deployments
from host.ray.serve_config import Proxies, with_deployments


def make_model_config(
    arguments: Mapping[str, Any], given: Mapping[str, Any], proxies: Proxies
) -> dict[str, Any]:
    """The contents of the file for `serve run` and `serve deploy`; Ray's ServeDeploySchema.

    `arguments`: as of `pbhost.ray.model_apps`. `given`: options of each model's deployment, before
    those that follow from its configuration. Raises ValueError.
    """
    options = read_options(arguments)
    names = [part.model for part in model_deployments(options, {})]
    parts = model_deployments(options, dict.fromkeys(names, given))
    deployments = [
        {"name": INGRESS, **ingress_settings(options, {})},
        *(
            {"name": part.name, **part.settings, "user_config": {"load_model": [part.model]}}
            for part in parts
        ),
    ]
    return with_deployments("pbhost.ray:model_apps", arguments, deployments, proxies)

"""The configuration file of Ray Serve for a model repository, with one or several deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from host.ray.deployment_options import DEPLOYMENT, derive_options, read_options, read_requirements
from host.ray.model_deployments import INGRESS, ingress_settings, model_deployments
from host.ray.servicer import GRPC_FUNCTION


@dataclass(frozen=True, slots=True)
class Proxies:
    """The ports of Ray Serve's proxies, and the address that they listen on."""

    host: str
    http_port: int
    grpc_port: int

    @property
    def http_options(self) -> dict[str, Any]:
        """In the form of Ray Serve's YAML."""
        return {"host": self.host, "port": self.http_port}

    @property
    def grpc_options(self) -> dict[str, Any]:
        """In the form of Ray Serve's YAML."""
        return {"port": self.grpc_port, "grpc_servicer_functions": [GRPC_FUNCTION]}


def make_config(
    arguments: Mapping[str, Any], deployment: Mapping[str, Any], proxies: Proxies
) -> dict[str, Any]:
    """The contents of the file for `serve run` and `serve deploy`; Ray's ServeDeploySchema.

    `arguments` and `deployment`: as of `pbhost.ray.app`. Raises ValueError.
    """
    options = read_options(arguments)
    settings = derive_options(options, read_requirements(options), deployment)
    if "request_router_config" not in deployment:
        settings.pop("request_router_config", None)  # the application knows whether there is one
    return with_deployments(
        "pbhost.ray:app", arguments, [{"name": DEPLOYMENT, **settings}], proxies
    )


def with_deployments(
    import_path: str,
    arguments: Mapping[str, Any],
    deployments: Sequence[Mapping[str, Any]],
    proxies: Proxies,
) -> dict[str, Any]:
    """The contents of the file for an application with these deployments."""
    return {
        "proxy_location": "EveryNode",
        "http_options": proxies.http_options,
        "grpc_options": proxies.grpc_options,
        "applications": [
            {
                "name": "pbhost",
                "route_prefix": "/",
                "import_path": import_path,
                "args": dict(arguments),
                "deployments": list(deployments),
            }
        ],
    }


def make_model_config(
    arguments: Mapping[str, Any], given: Mapping[str, Any], proxies: Proxies
) -> dict[str, Any]:
    """The contents of the file for `serve run` and `serve deploy`; Ray's ServeDeploySchema.

    `arguments`: as of `pbhost.ray.model_apps`. `given`: options of each model's deployment, before
    those that follow from its configuration. Raises ValueError.
    """
    options = read_options(arguments)
    parts = model_deployments(options, {}, given)
    deployments = [
        {"name": INGRESS, **ingress_settings(options, {})},
        *(
            {"name": part.name, **part.settings, "user_config": {"load_model": [part.model]}}
            for part in parts
        ),
    ]
    return with_deployments("pbhost.ray:model_apps", arguments, deployments, proxies)

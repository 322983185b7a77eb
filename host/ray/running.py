"""Runs an application on a Ray cluster until it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from host.ray.application import app
from host.ray.serve_config import Proxies


def run(arguments: Mapping[str, Any], deployment: Mapping[str, Any], proxies: Proxies) -> None:
    """Starts Ray Serve, and Ray on this machine unless RAY_ADDRESS names a cluster; blocks.

    `arguments` and `deployment`: as of `app`. Raises ValueError.
    """
    application = app({**arguments, "deployment": dict(deployment)})
    serve.start(
        proxy_location="EveryNode",
        http_options=proxies.http_options,
        grpc_options=proxies.grpc_options,
    )
    try:
        serve.run(application, name="pbhost", route_prefix="/", blocking=True)
    finally:
        serve.shutdown()

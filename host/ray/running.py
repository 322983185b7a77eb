"""Runs an application on a Ray cluster until it is interrupted."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ray import serve

from host.ray.application import app
from host.ray.arguments import read_options
from host.ray.per_model.application import model_apps
from host.ray.per_model.deployments import model_deployments
from host.ray.serve_config import Proxies

_APPLICATION = "pbhost"


def run(
    arguments: Mapping[str, Any],
    deployment: Mapping[str, Any],
    proxies: Proxies,
    per_model: bool = False,
) -> None:
    """Starts Ray Serve, and Ray on this machine unless RAY_ADDRESS names a cluster; blocks.

    At SIGINT (Ctrl-C) it deletes the application, also where a script runs it in the background.
    Where Ray Serve runs already, `proxies` have no effect. `arguments` and `deployment`: as of
    `app`. `per_model`: runs `model_apps`, with the options `deployment` for each model. Raises
    ValueError.
    """
    if per_model:
        models = [part.model for part in model_deployments(read_options(arguments), {})]
        application = model_apps(
            {**arguments, "deployments": dict.fromkeys(models, dict(deployment))}
        )
    else:
        application = app({**arguments, "deployment": dict(deployment)})
    serve.start(
        proxy_location="EveryNode",
        http_options=proxies.http_options,
        grpc_options=proxies.grpc_options,
    )
    # Shells start what is in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        serve.run(application, name=_APPLICATION, route_prefix="/", blocking=True)
    except KeyboardInterrupt:
        pass  # the way to end it
    finally:
        serve.delete(_APPLICATION)  # a cluster may have others

"""Applications for Ray Serve, of whole servers or with a deployment for each model; runs them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ray import serve

from host.ray.deployment_options import DEPLOYMENT, derive_options, read_options, read_requirements
from host.ray.model_connection import LOAD_SECONDS
from host.ray.model_deployments import INGRESS, ingress_settings, model_deployments
from host.ray.model_replicas import Ingress, ModelReplica
from host.ray.replica import Replica
from host.ray.serve_config import Proxies


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application of a model repository, for `serve run pbhost.ray:app` and its YAML.

    `args`: the flags of `pbhost serve` with `_` instead of `-`, and `deployment`, the options of
    the deployment in the form of Ray Serve's YAML (`num_replicas`, `ray_actor_options`, ...). The
    repository must be readable where this runs and where replicas run.

    Raises ValueError for a wrong flag, and for one that cannot work in several replicas.
    """
    arguments = dict(args)
    given = arguments.pop("deployment", {})
    options = read_options(arguments)
    settings = derive_options(options, read_requirements(options), given)
    return serve.deployment(Replica, name=DEPLOYMENT).options(**settings).bind(arguments)


def model_apps(args: Mapping[str, Any]) -> serve.Application:
    """The application of a model repository with one deployment per model, and one ingress.

    For `serve run pbhost.ray:model_apps` and its YAML. `args`: the flags of `pbhost serve` with `_`
    instead of `-`, and `deployments`, options of Ray Serve by model; "" is the ingress.
    `load_model` selects the models; without it, all of the repository have a deployment.

    Raises ValueError for a wrong flag, a missing model, or a configuration that cannot be read.
    """
    arguments = dict(args)
    return _make_model_apps(arguments, arguments.pop("deployments", {}), {})


def _make_model_apps(
    arguments: dict[str, Any],
    given: Mapping[str, Mapping[str, Any]],
    for_all: Mapping[str, Any],
) -> serve.Application:
    options = read_options(arguments)
    parts = model_deployments(options, given, for_all)
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
        application = _make_model_apps(dict(arguments), {}, deployment)
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

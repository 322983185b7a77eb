"""The application for Ray Serve whose replicas each hold a whole server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from host.ray.arguments import read_options
from host.ray.deployment_options import DEPLOYMENT, derive_options, read_requirements
from host.ray.replica import Replica


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

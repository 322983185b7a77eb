"""Serves models on a Ray cluster: pbhost's protocols over Ray Serve.

`app` is an application whose replicas each hold a whole server (`serve run pbhost.ray:app`).
`model_apps` is one with a deployment for each model (`serve run pbhost.ray:model_apps`). Ray's
`grpc_servicer_functions` must name `pbhost.ray.add_servicer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host.ray.applications import app, model_apps
    from host.ray.servicer import add_servicer

__all__ = ["add_servicer", "app", "model_apps"]

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use, as Ray is large."""
        if name == "add_servicer":
            from host.ray.servicer import add_servicer

            return add_servicer
        if name in __all__:
            from host import ray

            return getattr(ray, name)
        raise AttributeError(f"module 'pbhost.ray' has no attribute '{name}'")

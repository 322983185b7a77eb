"""Serves models on a Ray cluster: pbhost's protocols over Ray Serve.

`app` is an application whose replicas each hold a whole server (`serve run pbhost.ray:app`).
`model_apps` is one with a deployment for each model (`serve run pbhost.ray:model_apps`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host.ray.applications import app, model_apps

__all__ = ["app", "model_apps"]


def __getattr__(name: str) -> object:
    """Imports a public name on first use, as Ray is large."""
    if name == "app":
        from host.ray.applications import app

        return app
    if name == "model_apps":
        from host.ray.applications import model_apps

        return model_apps
    raise AttributeError(f"module 'host.ray' has no attribute '{name}'")

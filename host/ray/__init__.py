"""Serves models on a Ray cluster: pbhost's protocols over Ray Serve.

`app` is an application whose replicas each hold a whole server (`serve run host.ray:app`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host.ray.application import app

__all__ = ["app"]


def __getattr__(name: str) -> object:
    """Imports a public name on first use, as Ray is large."""
    if name != "app":
        raise AttributeError(f"module 'host.ray' has no attribute '{name}'")
    from host.ray.application import app

    return app

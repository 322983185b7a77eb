"""The static method ``preload`` of a model, which prepares what all instances share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

ARGUMENTS = ("model_config", "model_repository", "model_version", "model_name")
"""The keys of the argument of ``preload``: those of ``initialize`` that concern all instances."""


def defines_preload(model_class: type[Any]) -> bool:
    """Whether the class has a static method ``preload``; another method of that name is its own."""
    return isinstance(inspect.getattr_static(model_class, "preload", None), staticmethod)


def call_preload(model_class: type[Any], args: Mapping[str, str]) -> None:
    """Calls ``preload`` with its part of the arguments of ``initialize``, if there is one.

    Raises:
        Exception: any exception of the model.
    """
    if defines_preload(model_class):
        model_class.preload({name: args[name] for name in ARGUMENTS})

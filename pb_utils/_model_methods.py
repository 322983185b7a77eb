"""Which methods a model has, and the call of `preload`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any


def defines(model: object, method: str) -> bool:
    """Whether a model has a method, by its class or by its ``__getattr__``.

    If a property of the class raises another error than AttributeError, the model has it: the
    error tells the caller of the method what is wrong.
    """
    try:
        return hasattr(model, method)
    except Exception:  # `__getattr__` may raise anything for a name it does not know, as in Triton
        return any(method in vars(part) for part in type(model).__mro__)


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

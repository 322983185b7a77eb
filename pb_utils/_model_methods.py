"""The code of a model: imports its file, and tells and calls its methods."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Mapping
from typing import Any


def import_version(directory: str, version: str, file: str) -> types.ModuleType:
    """Imports ``<directory>/<version>/<file>`` as ``<version>.<stem>``.

    So relative imports of siblings work.

    Raises:
        Exception: any exception of the module.
    """
    package = types.ModuleType(version)
    # Not found on sys.path: the working directory comes first there.
    package.__path__ = [os.path.join(directory, version)]
    sys.modules[version] = package
    stem = file[: -len(".py")].replace("/", ".")
    return importlib.import_module(f"{version}.{stem}")


def import_file(path: str) -> types.ModuleType:
    """Imports exactly this file as ``<stem>``, even if ``sys.path`` has another of that name.

    Raises:
        Exception: any exception of the module.
    """
    name = os.path.basename(path)[: -len(".py")]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


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

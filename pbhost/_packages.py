"""Imports the packages `host` and `stub` as `pbhost.host` and `pbhost.stub`.

A program that imports pbhost may have a `host.py` or a package `stub` of its own. Both work in one
process, as `sys.modules` has ours under other names. In our modules, `import host` is an import of
`pbhost.host`: each has an `__import__` of its own among its builtins. In all other modules, it
finds the user's module, or ours if the user has none (docs/explanation/decisions/0039).
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PRIVATE = ("host", "stub")
_PUBLIC = ("pb_utils", "triton_python_backend_utils", "c_python_backend_utils")


def install() -> None:
    """Puts the finder of these packages first."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package == "pbhost":
            return _find_own(fullname, [_ROOT] if rest in _PRIVATE else path)
        if fullname in _PUBLIC:
            return PathFinder.find_spec(fullname, [_ROOT])
        if package in _PRIVATE and not rest.endswith("__main__"):  # which `python -m` executes
            return _find_alias(fullname, package)
        return None


def _find_own(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
    return spec


def _find_alias(fullname: str, package: str) -> ModuleSpec | None:
    """Finds our module under its short name, unless the user has a package of that name."""
    if fullname == package:
        if _is_of_user(package):
            return None
    elif sys.modules.get(package) is not sys.modules.get(f"pbhost.{package}"):
        return None
    try:
        module = importlib.import_module(f"pbhost.{fullname}")
    except ModuleNotFoundError as error:
        if error.name != f"pbhost.{fullname}":
            raise
        return None
    return spec_from_loader(fullname, _Alias(module))


def _is_of_user(package: str) -> bool:
    folders = [folder for folder in sys.path if not _is_root(folder)]
    found = PathFinder.find_spec(package, folders)
    if found is None or found.loader is not None:
        return found is not None
    return any(  # a folder without `__init__.py`: only if it is one of modules
        name.endswith(".py")
        for folder in found.submodule_search_locations or ()
        for name in os.listdir(folder)
    )


def _is_root(folder: str) -> bool:
    try:
        return os.path.realpath(folder) == _ROOT
    except FileNotFoundError:  # the working directory is gone
        return False


class _Loader(SourceFileLoader):
    """Loads one of our modules."""

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, whose `import` statements call `_import`."""
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Alias(Loader):
    """Puts a module that is already loaded under a second name into `sys.modules`."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restores what the import system has replaced."""
        module.__spec__ = self._spec


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Imports what a module of ours names."""
    package = "" if level else name.partition(".")[0]
    if package in _PRIVATE:
        name = f"pbhost.{name}"
        if not fromlist:
            builtins.__import__(name)
            return sys.modules[f"pbhost.{package}"]
    elif package in _PUBLIC:
        _check_is_own(package)
    return builtins.__import__(name, globals, locals, fromlist or (), level)


def _check_is_own(package: str) -> None:
    """Raises ImportError if the program has imported another module of this name."""
    spec = getattr(sys.modules.get(package), "__spec__", None)
    origin = spec.origin if spec is not None else None
    if origin is not None and not origin.startswith(os.path.join(_ROOT, package)):
        raise ImportError(
            f"pbhost needs its own module '{package}', but this process has imported"
            f" '{origin}'; rename that module"
        )


_BUILTINS = {**vars(builtins), "__import__": _import}

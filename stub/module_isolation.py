"""Keeps modules of this project apart from modules of the user that have the same names.

A model may have a `host.py`, a `stub.py` or a package `zmq` beside it, as it may in Triton.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, Dict, Mapping, Optional, Sequence

from pb_utils._api_modules import (
    LoadedModule,
    has_this_project,
    is_copy,
    keep_api_modules,
    report_copy,
)
from stub.wire.paths import real_path

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = {
    "host": _ROOT,
    "stub": _ROOT,
    "pb_utils": _ROOT,
}
_DEPENDENCIES = ("msgspec", "zmq", "setproctitle", "typing_extensions")


def isolate_modules() -> None:
    """Hides the modules of this project, until the user imports one that only this project has.

    Called before the model's folders are put on `sys.path`. A module of the user wins over ours
    of that name if its folder comes before ours, or was added to `sys.path` after this call. Only
    the API's modules are always ours.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        keep_api_modules()
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._folders = dict(_OWN)
        for name in _DEPENDENCIES:
            found = importlib.util.find_spec(name)
            if found is not None and found.origin is not None:
                folder = os.path.dirname(found.origin)
                is_package = found.submodule_search_locations is not None
                self._folders[name] = os.path.dirname(folder) if is_package else folder
        self._own: Dict[str, types.ModuleType] = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in self._folders
        }
        for name in self._own:
            del sys.modules[name]
        self._path_before = frozenset(sys.path)
        self._original_import = builtins.__import__

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Finds the user's module of one of our names, else ours."""
        own_folder = self._folders.get(fullname)
        if own_folder is None:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, self._user_path(own_folder))
        module = self._own.get(fullname)
        if found is not None and fullname == "pb_utils" and is_copy(found.origin):
            report_copy(str(found.origin))
            found = None
        if found is not None and found.loader is not None:
            if module is None or found.origin != module.__file__:
                builtins.__import__ = self._import
                return found
        if module is None:
            return None
        for name, loaded in self._own.items():
            if name.startswith(fullname + "."):
                sys.modules.setdefault(name, loaded)
        return importlib.util.spec_from_loader(fullname, LoadedModule(module))

    def _user_path(self, own_folder: str) -> Sequence[str]:
        own = os.path.realpath(own_folder)
        folders = []
        passed = False
        for folder in sys.path:
            if real_path(folder or ".") == own:
                passed = True
            elif (not passed or folder not in self._path_before) and not has_this_project(folder):
                folders.append(folder)
        return folders

    def _import(
        self,
        name: str,
        globals: Optional[Mapping[str, object]] = None,
        locals: Optional[Mapping[str, object]] = None,
        fromlist: Optional[Sequence[str]] = (),
        level: int = 0,
    ) -> Any:
        """Imports a module; our modules, and their functions, continue importing ours."""
        own = self._own
        if level == 0 and name in own and globals is not None:
            importer = own.get(str(globals.get("__name__")))
            if importer is not None and vars(importer) is globals:
                return own[name if fromlist else name.partition(".")[0]]
        return self._original_import(name, globals, locals, fromlist or (), level)

"""The imports of a model: keeps them apart from modules of this project, and lists their files.

A model may have a `host.py`, a `stub.py` or a package `zmq` beside it, as it may in Triton.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import site
import sys
import types
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from pb_utils._api_modules import (
    LoadedModule,
    has_this_project,
    is_copy,
    keep_api_modules,
    report_copy,
)
from stub.wire.paths import absolute_path, real_path

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_FOLDERS = {
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
        self._folders = dict(_OWN_FOLDERS)
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


_MAX_FILES = 10_000
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(
    os.path.join(_HERE, name) + os.sep
    for name in (
        "host",
        "stub",
        "pb_utils",
        "triton_python_backend_utils",
        "c_python_backend_utils",
    )
)
_PACKAGES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))


def list_imported_files(
    started: int, error: Optional[BaseException] = None
) -> List[Tuple[str, int, int]]:
    """Returns the files of the user's modules, as `ImportedFiles` describes them.

    `started` is the time when the process started, in nanoseconds since 1970. With `error`, an
    exception of an import, the files in its traceback are there too: a module that fails is not in
    `sys.modules`.
    """
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    seen: Set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            found.add(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        if isinstance(error, SyntaxError):
            found.add(error.filename)  # no frame has it
        error = error.__cause__
    paths = (
        os.path.normpath(absolute_path(path))
        for path in found
        if isinstance(path, str) and "<" not in path
    )
    user = sorted(path for path in paths if _is_of_user(path))
    return [_describe_file(path, started) for path in user[:_MAX_FILES]]


def _describe_file(path: str, started: int) -> Tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return path, 0, 0
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return (path, changed, status.st_size) if changed <= started else (path, 0, 0)


def _is_of_user(path: str) -> bool:
    library = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    user_site = (site.USER_SITE or library) + os.sep
    if path.startswith((library, user_site, *_OWN)):
        return False
    return not any(part in path for part in _PACKAGES)

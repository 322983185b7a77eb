"""Makes the module names of the API mean this API, whatever files of these names a model has.

Models come with a copy of Triton's `triton_python_backend_utils.py` beside `model.py`, from which
editors know its names. Triton adds its classes to that copy after the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Set, Tuple

if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

API_MODULES = ("triton_python_backend_utils", "c_python_backend_utils")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_COPY_NAMES = (API_MODULES[0], "pb_utils")
_COPY_FUNCTIONS = (b"get_input_tensor_by_name", b"serialize_byte_tensor", b"triton_string_to_numpy")
_MAX_COPY_BYTES = 1 << 20

_reported: List[str] = []
_report: Optional[Callable[[str], None]] = None


def report_to(report: Callable[[str], None]) -> None:
    """Sets the function that gets a text, once, for each file that was not imported.

    It gets the texts at once of the files that were found before.
    """
    global _report
    _report = report
    for text in _reported:
        report(text)


def describe_copy(packaged: bool) -> Tuple[str, str]:
    """Returns what happens to a file of the user that has the name of a module of the API.

    The second text says what to do. `packaged`: it is part of a package of the user.
    """
    advice = "the file can be deleted"
    if packaged:
        advice = f"import '{API_MODULES[0]}' without a package, and delete the file"
    return "is not imported: pbhost's own module is used in its place", advice


def report_copy(path: str, packaged: bool = False) -> None:
    """Reports a file that is not imported because a module of the API has its name."""
    fact, advice = describe_copy(packaged)
    text = f"'{path}' {fact}; {advice}"
    if text not in _reported:
        _reported.append(text)
        if _report is not None:
            _report(text)


def is_copy(path: Optional[str]) -> bool:
    """Tells whether a file is a `triton_python_backend_utils.py` of Triton, of any release."""
    if path is None or not path.endswith(".py"):
        return False
    try:
        with open(path, "rb") as file:
            source = file.read(_MAX_COPY_BYTES)
    except OSError:  # the import of the file says what is wrong with it
        return False
    return all(b"\ndef %s(" % name in source for name in _COPY_FUNCTIONS)


def has_this_project(folder: str) -> bool:
    """Tells whether a folder holds this project or another copy of it, such as an installed one."""
    return os.path.isfile(os.path.join(folder, "pb_utils", "_runtime.py"))


def keep_api_modules() -> None:
    """Makes later imports of the API's modules return those of this project.

    A copy of the user that is imported already gets their names, as from Triton.
    """
    if not any(isinstance(finder, _ApiFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ApiFinder())


class LoadedModule(importlib.abc.Loader):
    """Puts a module that is already loaded back into `sys.modules`."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Returns the module."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restores what the import system has replaced; the module itself ran long ago."""
        module.__spec__ = self._spec


class _ApiFinder(importlib.abc.MetaPathFinder):
    """Finds the API's modules instead of the user's files.

    These are any file with the whole name of a module of the API, and a copy of Triton's in a
    package: what else lies in a package may be the user's own.
    """

    def __init__(self) -> None:
        self._replaced: Set[str] = set()  # files of the user
        self._modules: Dict[str, types.ModuleType] = {}
        for name in API_MODULES:
            imported = sys.modules.pop(name, None)
            if imported is not None and _is_of_this_project(imported.__file__):
                self._modules[name] = imported
                continue
            self._modules[name] = module = _import_own(name)
            if imported is not None:
                report_copy(imported.__file__ or name)
                vars(imported).update(_public_names(module))

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Finds a module of the API."""
        module = self._modules.get(fullname)
        if module is not None:
            folders = [folder for folder in sys.path if not has_this_project(folder)]
            found = importlib.machinery.PathFinder.find_spec(fullname, folders)
            if found is not None and found.origin is not None:
                self._replace(found.origin, module)
        elif path is not None and fullname.rpartition(".")[2] in _COPY_NAMES:
            found = importlib.machinery.PathFinder.find_spec(fullname, path)
            if found is None or not is_copy(found.origin):
                return None
            module = self._modules[API_MODULES[0]]
            self._replace(str(found.origin), module, packaged=True)
        else:
            return None
        return importlib.util.spec_from_loader(fullname, LoadedModule(module))

    def _replace(self, path: str, module: types.ModuleType, packaged: bool = False) -> None:
        if path not in self._replaced:
            self._replaced.add(path)
            report_copy(path, packaged)
            _add_names(module, path)


def _is_of_this_project(path: Optional[str]) -> bool:
    return path is not None and has_this_project(os.path.dirname(os.path.dirname(path)))


def _import_own(name: str) -> types.ModuleType:
    """Imports a module of this project by its place: the user's may come first on the path."""
    place = os.path.join(_ROOT, name, "__init__.py")
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None  # every .py file has a loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _public_names(module: types.ModuleType) -> Dict[str, object]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _add_names(module: types.ModuleType, path: str) -> None:
    """Makes names that only the user's copy has, such as functions of the user, be found as well.

    The copy is imported only for such a name: an old one may fail with today's libraries.
    """
    missing: Callable[[str], object] = vars(module)["__getattr__"]
    added: List[types.ModuleType] = []

    def find_name(name: str) -> object:
        if name.startswith("__"):  # the import system and other libraries look for such names
            return missing(name)
        if not added:
            spec = importlib.util.spec_from_file_location(module.__name__, path)
            if spec is None or spec.loader is None:  # not Python
                return missing(name)
            copy = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(copy)
            except Exception as error:  # the copy may raise anything
                raise AttributeError(f"{path} cannot be imported: {error!r}") from error
            vars(copy).update(_public_names(module))
            added.append(copy)
        return vars(added[0])[name] if name in vars(added[0]) else missing(name)

    vars(module)["__getattr__"] = find_name

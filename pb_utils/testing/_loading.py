"""Finding, importing and configuring a model as a stub does, and undoing it afterwards."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pb_utils._model_config import ModelConfig
from pb_utils._model_exception import TritonModelException


class LoadedModel(NamedTuple):
    """A model's class, the file that defines it, the model's folder, and how to forget it all."""

    model_class: type[Any]
    file: Path
    directory: Path
    version: str
    unload: Callable[[], None]


def load_class(model_class: type[Any], version: int | str | None) -> LoadedModel:
    """Take a class as it is; its model's folder is that of its file."""
    try:
        file = Path(inspect.getfile(model_class)).resolve()
    except (OSError, TypeError):  # it was typed into an interpreter
        file = Path.cwd() / "model.py"
    return LoadedModel(model_class, file, file.parent, str(version or 1), lambda: None)


def load_folder(directory: Path, version: int | str | None, filename: str) -> LoadedModel:
    """Import the model of a folder ``<version>/<filename>``, by default of the highest version.

    Raises:
        TritonModelException: there is no such file.
        Exception: whatever importing it raises.
    """
    chosen = str(version or _latest_version(directory))
    imports = _ModelImports(directory, chosen)
    try:
        model_class = imports.import_model_class(filename)
    except BaseException:  # a module may raise anything, SystemExit too
        imports.remove_modules()
        raise
    return LoadedModel(
        model_class, directory / chosen / filename, directory, chosen, imports.remove_modules
    )


def load_backend(backend: Path, directory: Path, version: int | str | None) -> LoadedModel:
    """Import ``model.py`` of a Python-based backend's folder, for the model in ``directory``.

    Raises:
        TritonModelException: there is no such file.
        Exception: whatever importing it raises.
    """
    chosen = str(version or _latest_version(directory))
    imports = _ModelImports(backend, "")
    try:
        model_class = imports.import_model_class("model.py")
    except BaseException:  # a module may raise anything, SystemExit too
        imports.remove_modules()
        raise
    return LoadedModel(model_class, backend / "model.py", directory, chosen, imports.remove_modules)


class _ModelImports:
    """Makes the modules of a model importable, and forgets them again.

    Without a version they lie in ``directory`` itself, and are no package.
    """

    def __init__(self, directory: Path, version: str) -> None:
        self._directory = directory
        self._version = version
        self._modules_before = set(sys.modules)
        self._paths = [str(directory / version), str(directory)] if version else [str(directory)]

    def import_model_class(self, filename: str) -> type[Any]:
        """Import ``<version>.<stem>``, or ``<stem>``, and return its ``TritonPythonModel``."""
        if not filename.endswith(".py"):
            raise TritonModelException(
                f"Model name must end with '.py'. Model name is \"{filename}\"."
            )
        path = self._directory / self._version / filename
        if not path.is_file():
            raise TritonModelException(f"Python model file not found in '{path}'")
        top = self._version or path.stem
        self._remove_modules_where(lambda name, module: name.split(".")[0] == top)
        sys.path.extend(self._paths)
        importlib.invalidate_caches()
        if self._version:
            package = types.ModuleType(self._version)
            package.__path__ = [self._paths[0]]
            sys.modules[self._version] = package
            module = importlib.import_module(f"{self._version}.{path.stem}")
        else:
            module = _plain_module(path)
        model_class: type[Any] = module.TritonPythonModel
        return model_class

    def remove_modules(self) -> None:
        """Forget what was imported from the model's folder since."""
        inside = str(self._directory) + "/"
        self._remove_modules_where(
            lambda name, module: (
                name.split(".")[0] == self._version
                or (
                    name not in self._modules_before
                    and str(getattr(module, "__file__", None) or "").startswith(inside)
                )
            )
        )
        for path in self._paths:
            if path in sys.path:
                sys.path.reverse()  # ours are the last ones of that name
                sys.path.remove(path)
                sys.path.reverse()

    @staticmethod
    def _remove_modules_where(unwanted: Any) -> None:
        for name, module in list(sys.modules.items()):
            if unwanted(name, module):
                del sys.modules[name]


def _plain_module(path: Path) -> types.ModuleType:
    """Import exactly that file, whatever else on the path has its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _latest_version(directory: Path) -> str:
    versions = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
    if not versions:
        raise TritonModelException(f"no version folder in '{directory}'")
    return str(max(versions))


def full_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration with everything that a server always fills in."""
    full: dict[str, Any] = {
        "name": name,
        "platform": "",
        "backend": "python",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [],
        "output": [],
        "batch_input": [],
        "batch_output": [],
        "optimization": {},
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": 1}],
        "default_model_filename": "model.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }
    full.update(json.loads(json.dumps(config)))
    full["input"] = [{**_INPUT, **tensor} for tensor in full["input"]]
    full["output"] = [{**_OUTPUT, **tensor} for tensor in full["output"]]
    return full


_KINDS = {"KIND_GPU": "GPU", "KIND_MODEL": "MODEL"}
_OUTPUT = {
    "name": "",
    "data_type": "TYPE_INVALID",
    "dims": [],
    "label_filename": "",
    "is_shape_tensor": False,
    "is_non_linear_format_io": False,
}
_INPUT = {
    "name": "",
    "data_type": "TYPE_INVALID",
    "format": "FORMAT_NONE",
    "dims": [],
    "is_shape_tensor": False,
    "allow_ragged_batch": False,
    "optional": False,
    "is_non_linear_format_io": False,
}


def completed_config(model_class: type[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as the model's ``auto_complete_config`` completes it.

    Raises:
        TritonModelException: the function returns something else than a ``ModelConfig``.
    """
    completed = model_class.auto_complete_config(ModelConfig(json.dumps(config)))
    if not isinstance(completed, ModelConfig):
        raise TritonModelException(
            f"auto_complete_config function in model '{config['name']}' must return a valid "
            "pb.ModelConfig object."
        )
    return full_config(completed.as_dict(), config["name"])


def initialize_arguments(
    config: Mapping[str, Any], directory: Path, version: str
) -> dict[str, str]:
    """Return what ``initialize`` is given: the first instance of the first group."""
    group = (config["instance_group"] or [{}])[0]
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": _KINDS.get(group.get("kind", ""), "CPU"),
        "model_instance_name": instance_name(config),
        "model_instance_device_id": str((group.get("gpus") or [0])[0]),
        "model_repository": str(directory),
        "model_version": version,
        "model_name": config["name"],
    }


def instance_name(config: Mapping[str, Any]) -> str:
    """Return the name of the model's first instance."""
    groups = config["instance_group"]
    return f"{(groups and groups[0].get('name')) or config['name']}_0"

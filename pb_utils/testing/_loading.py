"""Finds, imports and configures a model as a stub does, and removes its modules afterwards."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pb_utils import _model_texts as texts
from pb_utils._exceptions import TritonModelException
from pb_utils._model_code import import_file, import_version
from pb_utils._model_config import ModelConfig


class LoadedModel(NamedTuple):
    """An imported model. ``unload`` removes its modules."""

    model_class: type[Any]
    file: Path
    directory: Path
    version: str
    unload: Callable[[], None]


def read_folder(
    directory: Path, version: int | str | None, backend: str | os.PathLike[str] | None
) -> Mapping[str, Any]:
    """Reads a model's folder as a server does, by pbhost, which knows configurations.

    Args:
        directory: folder of the model.
        version: version to load; the one that clients get if None.
        backend: folder of the model's Python-based backend, which lies among other backends.

    Returns:
        ``version``, ``config`` as JSON text, and ``backend``: the folder of a Python-based backend,
        or "".

    Raises:
        TritonModelException: the folder, its configuration or the version cannot be used.
    """
    importlib.import_module("pbhost")  # finds the packages of the server
    errors = importlib.import_module("pbhost.host.errors")
    folder = importlib.import_module("pbhost.host.models.instance_loader")
    try:
        number = None if version is None else int(version)
        backends = "" if backend is None else str(Path(backend).resolve().parent)
        read = folder.read_model(directory, number, backend_directory=backends)
        described: Mapping[str, Any] = folder.describe_model(*read)
    except ValueError:
        raise TritonModelException(f"the version of a model is a number, not '{version}'") from None
    except errors.HostError as error:
        raise TritonModelException(error.message) from None
    return described


def load_class(model_class: type[Any], version: int | str | None) -> LoadedModel:
    """Returns the model of a class. Its folder is that of the file of the class."""
    try:
        file = Path(inspect.getfile(model_class)).resolve()
    except (OSError, TypeError):  # a class of an interactive session has no file
        file = Path.cwd() / "model.py"
    return LoadedModel(
        model_class, file, file.parent, "1" if version is None else str(version), lambda: None
    )


def load_folder(
    directory: Path, version: int | str | None, filename: str, backend: Path | None = None
) -> LoadedModel:
    """Imports the model ``<directory>/<version>/<filename>``.

    Args:
        directory: folder of the model.
        version: version to load; the highest if None.
        filename: name of the model's file.
        backend: folder of a Python-based backend, whose ``model.py`` is imported instead.

    Raises:
        TritonModelException: there is no such file.
        Exception: any exception of the import.
    """
    chosen = _latest_version(directory) if version is None else str(version)
    if backend is None:
        imports = _ModelImports(directory, chosen, filename)
    else:
        imports = _ModelImports(backend, "", "model.py")
    try:
        model_class = imports.import_model_class()
    except BaseException:  # a module may raise any exception, also SystemExit
        imports.remove_modules()
        raise
    return LoadedModel(model_class, imports.file, directory, chosen, imports.remove_modules)


class _ModelImports:
    """Imports the modules of a model, and removes them afterwards.

    With a version, the model is a module of the package ``<version>``. Without, as for a backend,
    it is a plain module of ``directory``.
    """

    def __init__(self, directory: Path, version: str, filename: str) -> None:
        self.file = directory / version / filename
        self._filename = filename
        self._directory = directory
        self._version = version
        self._modules_before = set(sys.modules)
        self._paths = [str(directory / version), str(directory)] if version else [str(directory)]

    def import_model_class(self) -> type[Any]:
        """Imports ``<version>.<stem>`` or ``<stem>``, and returns its TritonPythonModel."""
        path, filename = self.file, self._filename
        if not filename.endswith(".py"):
            raise TritonModelException(texts.no_python_file(filename))
        if not path.is_file():
            raise TritonModelException(texts.missing_file(path))
        top = self._version or path.stem
        self._remove_modules_where(lambda name, module: name.split(".")[0] == top)
        sys.path.extend(self._paths)
        importlib.invalidate_caches()
        if self._version:
            module = import_version(str(self._directory), self._version, filename)
        else:
            module = import_file(str(path))
        model_class: type[Any] | None = getattr(module, "TritonPythonModel", None)
        if model_class is None:
            raise TritonModelException(
                f"'{path}' has no class TritonPythonModel; a model must define this class"
            )
        return model_class

    def remove_modules(self) -> None:
        """Removes the modules that were imported from the model's folder, and its paths."""
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
                sys.path.reverse()  # removes the last occurrence, the appended one
                sys.path.remove(path)
                sys.path.reverse()

    @staticmethod
    def _remove_modules_where(unwanted: Any) -> None:
        for name, module in list(sys.modules.items()):
            if unwanted(name, module):
                del sys.modules[name]


def _latest_version(directory: Path) -> str:
    versions = [
        int(path.name)
        for path in directory.glob("*")
        if path.is_dir() and re.fullmatch(r"0|[1-9][0-9]*", path.name)
    ]
    if not versions:
        raise TritonModelException(f"no version folder in '{directory}'")
    return str(max(versions))


def normalized_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a configuration with the fields that a server adds."""
    normalized: dict[str, Any] = {
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
    normalized.update(json.loads(json.dumps(config)))
    normalized["input"] = [{**_INPUT, **tensor} for tensor in normalized["input"]]
    normalized["output"] = [{**_OUTPUT, **tensor} for tensor in normalized["output"]]
    return normalized


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


def auto_completed_config(model_class: type[Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration after ``auto_complete_config`` of the model.

    Raises:
        TritonModelException: the method does not return a ``ModelConfig``.
    """
    completed = model_class.auto_complete_config(ModelConfig(json.dumps(config)))
    if not isinstance(completed, ModelConfig):
        raise TritonModelException(texts.no_model_config(config["name"]))
    return normalized_config(completed.as_dict(), config["name"])


def initialize_arguments(
    config: Mapping[str, Any], directory: Path, version: str
) -> dict[str, str]:
    """Returns the arguments of ``initialize`` for the first instance of the first group."""
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
    """Returns the name of the model's first instance."""
    groups = config["instance_group"]
    return f"{(groups and groups[0].get('name')) or config['name']}_0"

"""Finds the code of a model: in its version folder, or in a backend's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from host.config.findings import Finding, Findings, raise_first
from host.config.model_config import LoadedConfig
from host.config.schema import ModelConfig, new_config, suggestion
from host.environments.model_environments import PATH_PARAMETER
from host.errors import ErrorCode
from stub.wire.messages import ModelSource
from stub.wire.paths import absolute_path

_OWN = "python"  # the backend of models that have a `model.py` of their own
_OWN_LIBRARY = "libtriton_python.so"  # of Triton's Python backend, for which this host stands
_RUNTIME = "model.py"  # the file that makes a folder a Python-based backend
_SHIPPED = Path(__file__).resolve().parents[2] / "stub" / "backends"
_SERVED = (_OWN, *sorted(file.parent.name for file in _SHIPPED.glob(f"*/{_RUNTIME}")))


class Backends:
    """The folders of backends, `<directory>/<backend>`, which need not exist.

    `settings`: the backend settings of the command line, by backend; "" for all backends. Backends
    of frameworks ship with the host; a Python-based backend of the same name in the directory
    replaces them.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self.directory = Path(absolute_path(str(directory)))
        self._settings = settings or {}

    def find_backend(
        self, model_dir: Path, version: int, loaded: LoadedConfig
    ) -> tuple[ModelSource, LoadedConfig]:
        """Returns the code of a version, and its configuration completed from where that code is.

        The configuration of a Python-based backend names it in `runtime`, and gets the execution
        environment in the backend's folder as default (docs/reference/model-processes.md,
        "Python-based backends"). Raises HostError INVALID_ARG if there is no such backend,
        UNSUPPORTED if it is a native library.
        """
        config = loaded.config
        if config.backend == _OWN and config.runtime in ("", _OWN_LIBRARY):
            return ModelSource(str(model_dir), version, config.default_model_filename), loaded
        raise_first(_check_name(config, self.directory), loaded.source)
        folder = self.directory / config.backend
        places = [model_dir / str(version), model_dir, folder]
        settings = {**self._settings.get("", {}), **self._settings.get(config.backend, {})}
        shipped = _SHIPPED / config.backend
        if _is_shipped_backend(config, shipped, folder):
            # A library in the model's own folder is specific to this model.
            libraries = [place / _library(config) for place in places[:-1]]
            raise_first(_refuse_native(config, libraries, "backend"), loaded.source)
            return ModelSource(str(model_dir), version, _RUNTIME, str(shipped), settings), loaded
        check = _check_runtime if config.runtime else _check_backend
        raise_first(check(config, places), loaded.source)
        source = ModelSource(str(model_dir), version, _RUNTIME, str(folder), settings)
        return source, LoadedConfig(
            _with_runtime(config, folder), loaded.source, namespace=loaded.namespace
        )


def is_shipped_source(source: ModelSource) -> bool:
    """Whether the code of a model is a backend of a framework that ships with the host."""
    return bool(source.backend) and Path(source.backend).parent == _SHIPPED


def _library(config: ModelConfig) -> str:
    """The file name of the backend's native library."""
    return f"libtriton_{config.backend}.so"


def _is_shipped_backend(config: ModelConfig, shipped: Path, folder: Path) -> bool:
    """Whether the backend that ships with the host replaces the native one."""
    if not (shipped / _RUNTIME).is_file():
        return False
    return config.runtime == _library(config) or not (
        config.runtime or (folder / _RUNTIME).is_file()
    )


def _check_name(config: ModelConfig, directory: Path) -> Findings:
    """A backend's name must not be a path."""
    name = config.backend
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        yield Finding(
            f"backend name '{name}' escapes backend directory '{directory}', for model "
            f"'{config.name}', check model config backend field",
            "backend",
        )


def _check_runtime(config: ModelConfig, places: Sequence[Path]) -> Findings:
    """The `runtime` of the configuration must be a Python-based backend's."""
    runtime, folder = config.runtime, places[-1]
    if runtime == _RUNTIME:
        if not (folder / runtime).is_file():
            yield Finding(
                f"unable to find Python backend based backend library '{runtime}' for model "
                f"'{config.name}', searched: '{folder / runtime}'",
                "runtime",
            )
        return
    if not Path(os.path.normpath(folder / runtime)).is_relative_to(folder):
        yield Finding(
            f"backend library name '{runtime}' escapes backend directory '{folder}', for model "
            f"'{config.name}', check model config runtime field",
            "runtime",
        )
    yield from _refuse_native(config, [place / runtime for place in places], "runtime")
    searched = "".join(f"'{place}' " for place in places)
    yield Finding(
        f"unable to find backend library '{runtime}' for model '{config.name}', searched: "
        f"{searched}",
        "runtime",
    )


def _check_backend(config: ModelConfig, places: Sequence[Path]) -> Findings:
    """Without a `runtime`, a native library is preferred to a Python file."""
    libraries = [place / _library(config) for place in places]
    yield from _refuse_native(config, libraries, "backend")
    if not (places[-1] / _RUNTIME).is_file():
        yield Finding(
            f"unable to find backend library for backend '{config.backend}', "
            "try specifying runtime on the model configuration.",
            "backend",
            advice=suggestion(config.backend, _SERVED).removeprefix(", "),
        )


def _refuse_native(config: ModelConfig, libraries: Sequence[Path], field: str) -> Findings:
    for library in libraries:
        if library.exists():
            what = "file" if library.suffix == ".py" else "native library"
            yield Finding(
                f"model '{config.name}' cannot be loaded: its backend '{config.backend}' is the "
                f"{what} '{library}', and only backends written in Python can be run, from "
                f"'{_RUNTIME}' in the backend's folder; where that is there too, choose it by "
                f'runtime: "{_RUNTIME}"',
                field,
                ErrorCode.UNSUPPORTED,
            )


def _with_runtime(config: ModelConfig, folder: Path) -> ModelConfig:
    settled = new_config()
    settled.CopyFrom(config)
    settled.runtime = _RUNTIME
    environment = folder / f"pb_exec_env_{_RUNTIME}.tar.gz"
    if PATH_PARAMETER not in config.parameters and environment.is_file():
        settled.parameters[PATH_PARAMETER].string_value = str(environment)
    return settled

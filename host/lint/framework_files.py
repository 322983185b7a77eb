"""Checks that the model files that a framework's backend opens are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from host.config.schema import ModelConfig, closest_choice
from host.lint.problem import Problem

_FILE_BY_CAPABILITY = ("pytorch", "tensorrt")
"""The backends that use `cc_model_filenames` on a GPU."""
_GRAPHDEF = "tensorflow_graphdef"


def find_missing_files(config: ModelConfig, path: Path) -> Iterator[Problem]:
    """Yields the problem of a version whose model file, `path`, is missing or of the wrong kind.

    The texts are those of the backends. The file is not opened. A missing file is a warning if the
    backend may open another one, because of the GPU that it runs on. Reads folders, so it blocks.
    """
    by_capability = config.cc_model_filenames if config.backend in _FILE_BY_CAPABILITY else {}
    missing = _describe_missing_file(config, path)
    if missing:
        yield Problem(
            path,
            missing,
            "default_model_filename",
            _advise(config.default_model_filename, path),
            warning=bool(by_capability),
        )
    for capability, name in sorted(by_capability.items()):
        other = path.parent / name
        if not other.is_file():
            text = f"unable to find '{other}' for model '{config.name}'"
            field = f"cc_model_filenames[{capability}]"
            yield Problem(path, text, field, _advise(name, other), warning=True)


def _describe_missing_file(config: ModelConfig, path: Path) -> str:
    """Returns the error of the backend, "" if the file is there."""
    if config.backend == "onnxruntime":
        if not path.exists():
            return f"failed to stat file {path}"
        path = path / "model.onnx" if path.is_dir() else path
        found = path.is_file()
    elif config.backend == "tensorflow" and config.platform != _GRAPHDEF:
        found = path.is_dir()
    else:
        found = path.is_file()
    return "" if found else f"unable to find '{path}' for model '{config.name}'"


def _advise(name: str, path: Path) -> str:
    """Returns what to do about a missing file: use one of the same type, if there is one."""
    folder = path.parent
    others = [
        entry.name
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if entry.suffix == path.suffix and entry != path
    ]
    other = closest_choice(name, others) or (others[0] if len(others) == 1 else "")
    if other:
        return f"did you mean '{other}', which is in this folder?"
    return "put the model's file there, or name another file"

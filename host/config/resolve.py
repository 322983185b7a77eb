"""Filling in backend, platform and file name from each other and from what a version holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from host.config.schema import ModelConfig
from host.errors import invalid_argument

_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
_MAX_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Framework:
    """One line of the table of known frameworks: how each of its facts implies the others."""

    backend: str
    platform: str
    file_name: str
    kind: str = "any"  # what the entry in a version directory must be to count
    aliases: tuple[str, ...] = ()

    @property
    def platforms(self) -> tuple[str, ...]:
        return (self.platform, *self.aliases) if self.platform else ()

    def found_in(self, version_dir: Path) -> bool:
        entry = version_dir / self.file_name
        return {"file": entry.is_file, "directory": entry.is_dir, "any": entry.exists}[self.kind]()


# In the order in which they are tried (configuration spec 1.5, 1.6).
_FRAMEWORKS = (
    _Framework("tensorflow", "tensorflow_graphdef", "model.graphdef", "file"),
    _Framework("tensorflow", "tensorflow_savedmodel", "model.savedmodel", "directory"),
    _Framework("tensorrt", "tensorrt_plan", "model.plan", "file"),
    _Framework("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    _Framework("openvino", "", "model.xml"),
    _Framework("pytorch", "pytorch_libtorch", "model.pt", "file", ("libtorch",)),
    _Framework("pytorch", "torch_aoti", "model.pt2", "file"),
    _Framework("python", "", "model.py"),
)

PLATFORMS_OF_BACKEND = {
    backend: {known.platform for known in _FRAMEWORKS if known.backend == backend}
    for backend in ("tensorflow", "tensorrt", "onnxruntime", "pytorch")
}
"""The platforms that go with a backend, for the backends that have platforms."""


def is_version(name: str) -> bool:
    """Whether a directory of this name is a version: `0` or digits without a leading zero."""
    return _VERSION.fullmatch(name) is not None and int(name) <= _MAX_VERSION


def first_version_dir(model_dir: Path) -> Path | None:
    """The version directory that stands for all when facts are inferred from files."""
    if not model_dir.is_dir():
        return None
    found = sorted(
        entry.name for entry in model_dir.iterdir() if is_version(entry.name) and entry.is_dir()
    )
    return model_dir / found[0] if found else None


def resolve_backend(config: ModelConfig, model: str, version_dir: Path | None) -> None:
    """Fill in what is missing of backend, platform and default file name (spec 1.6)."""
    framework = _named(config) or _present(config, version_dir)
    if framework is not None:
        config.backend = framework.backend
        config.platform = config.platform or framework.platform
        config.default_model_filename = config.default_model_filename or framework.file_name
    elif not (config.backend or config.platform or config.default_model_filename):
        _from_model_name(config, model)


def _named(config: ModelConfig) -> _Framework | None:
    """The framework that the platform or the file name stands for."""
    for known in _candidates(config):
        # A TensorFlow file name counts only as long as no platform contradicts it.
        by_file = not (config.platform and known.backend == "tensorflow")
        if config.platform in known.platforms:
            return known
        if by_file and config.default_model_filename == known.file_name:
            return known
    return None


def _present(config: ModelConfig, version_dir: Path | None) -> _Framework | None:
    """The framework whose file the version holds, else the first one of the named backend."""
    candidates = _candidates(config)
    if version_dir is not None and not (config.platform or config.default_model_filename):
        for known in candidates:
            if known.found_in(version_dir):
                return known
    # Which of its two formats a TensorFlow model has must be known; the others have a default.
    named = config.backend and config.backend != "tensorflow" and candidates
    return candidates[0] if named else None


def _candidates(config: ModelConfig) -> list[_Framework]:
    return [known for known in _FRAMEWORKS if config.backend in ("", known.backend)]


def _from_model_name(config: ModelConfig, model: str) -> None:
    """`<name>.<backend>`: whatever follows the first dot names the backend."""
    _, dot, backend = model.partition(".")
    if not dot:
        raise invalid_argument(
            f"Invalid model name: Could not determine backend for model '{model}' with no backend "
            "in model configuration. Expected model name of the form 'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"

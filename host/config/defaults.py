"""Fills in the fields that a configuration leaves out: backend, version policy, schedulers.

Backend, platform and default file name follow from each other and from the files of a version; the
other fields have fixed defaults, or come from the model's `auto_complete_config`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from host.config.schema import ConfigPart, ModelConfig, is_ensemble
from host.errors import HostError, internal, invalid_argument

_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")
_MAX_VERSION = 2**63 - 1


def is_version(name: str) -> bool:
    """Whether this is the name of a version directory: `0`, or digits without a leading zero."""
    return _VERSION.fullmatch(name) is not None and int(name) <= _MAX_VERSION


def find_subdirectories(model_dir: Path) -> list[str]:
    """The sorted names of the directories in a model's directory, of versions and others. Blocks.

    Raises HostError INTERNAL if the directory cannot be read.
    """
    try:
        entries = sorted(os.listdir(model_dir))
    except OSError:
        raise internal(f"failed to stat file {model_dir}") from None
    return [name for name in entries if os.path.isdir(model_dir / name)]


def find_versions(model_dir: Path) -> list[int]:
    """The versions in the model directory, ascending. Blocks. Raises HostError INTERNAL."""
    return sorted(int(name) for name in find_subdirectories(model_dir) if is_version(name))


def apply_version_policy(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """Those of the versions that the version policy selects, ascending."""
    policy, versions = config.version_policy, sorted(available)
    if policy.HasField("specific"):
        return [version for version in versions if version in policy.specific.versions]
    if policy.HasField("latest"):
        return versions[-policy.latest.num_versions :] if policy.latest.num_versions else []
    return versions


_DEFAULT_IDLE_US = 1_000_000


@dataclass(frozen=True, slots=True)
class _Framework:
    """A known framework: its backend, platform and file name, each of which implies the others."""

    backend: str
    platform: str
    file_name: str
    kind: str = "any"  # what the model file must be: a file, a directory or any entry
    aliases: tuple[str, ...] = ()

    @property
    def platforms(self) -> tuple[str, ...]:
        return (self.platform, *self.aliases) if self.platform else ()

    def found_in(self, version_dir: Path) -> bool:
        entry = version_dir / self.file_name
        return {"file": entry.is_file, "directory": entry.is_dir, "any": entry.exists}[self.kind]()


# In the order of docs/reference/configuration-and-scheduling.md, "Known frameworks" and "How
# backend, platform and file name are found".
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
"""The valid platforms of each backend that has platforms."""


def resolve_backend(config: ModelConfig, model: str, model_dir: Path) -> None:
    """Fills in backend, platform and default file name where they are missing. Blocks.

    The rules are in docs/reference/configuration-and-scheduling.md, "How backend, platform and file
    name are found"; the version policy must be set. Raises HostError INVALID_ARG if nothing in the
    configuration, the files or the model name tells the backend, or if the selected versions have
    files of different frameworks.
    """
    framework = _find_by_config(config) or _find_by_files(config, model, model_dir)
    if framework is not None:
        config.backend = framework.backend
        config.platform = config.platform or framework.platform
        config.default_model_filename = config.default_model_filename or framework.file_name
    elif not (config.backend or config.platform or config.default_model_filename):
        _set_from_model_name(config, model)


def _find_by_config(config: ModelConfig) -> _Framework | None:
    """The framework that the platform or the file name in the configuration belongs to."""
    for known in _candidates(config):
        # TensorFlow file names are used only if no platform is set.
        by_file = not (config.platform and known.backend == "tensorflow")
        if config.platform in known.platforms:
            return known
        if by_file and config.default_model_filename == known.file_name:
            return known
    return None


def _find_by_files(config: ModelConfig, model: str, model_dir: Path) -> _Framework | None:
    """The framework whose file is in the selected versions, else the first of the backend.

    If none of them has one, another version tells which file is missing.
    """
    candidates = _candidates(config)
    if not (config.platform or config.default_model_filename):
        available = find_versions(model_dir)
        selected = _find_in_versions(model_dir, apply_version_policy(config, available), candidates)
        lowest = next(iter(selected), 0)
        for version, known in selected.items():
            if known is not selected[lowest]:
                raise _different_kinds_error(model, lowest, selected[lowest], version, known)
        found = selected or _find_in_versions(model_dir, reversed(available), candidates)
        if found:
            return next(iter(found.values()))
    # Other backends have a default format; TensorFlow has two formats and no default.
    has_default = config.backend and config.backend != "tensorflow" and candidates
    return candidates[0] if has_default else None


def _find_in_versions(
    model_dir: Path, versions: Iterable[int], candidates: Iterable[_Framework]
) -> dict[int, _Framework]:
    """For each version that has a file of a candidate, the first of these candidates."""
    found = {}
    for version in versions:
        known = next((one for one in candidates if one.found_in(model_dir / str(version))), None)
        if known is not None:
            found[version] = known
    return found


def _different_kinds_error(
    model: str, version: int, known: _Framework, other_version: int, other: _Framework
) -> HostError:
    return invalid_argument(
        f"versions {version} and {other_version} of model '{model}' are of different kinds:"
        f" '{version}/{known.file_name}' needs the backend '{known.backend}', and"
        f" '{other_version}/{other.file_name}' the backend '{other.backend}'; all versions of a"
        " model have one backend and one file name: set 'backend' and 'default_model_filename', or"
        " let 'version_policy' select versions of one kind"
    )


def _candidates(config: ModelConfig) -> list[_Framework]:
    return [known for known in _FRAMEWORKS if config.backend in ("", known.backend)]


def _set_from_model_name(config: ModelConfig, model: str) -> None:
    """Sets the backend from a model name `<name>.<backend>`."""
    _, dot, backend = model.partition(".")
    if not dot:
        raise invalid_argument(
            f"Invalid model name: Could not determine backend for model '{model}' with no backend "
            "in model configuration. Expected model name of the form 'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"


def normalise_config(config: ModelConfig) -> None:
    """Fills in version policy, schedulers and pinned memory.

    The rules are in docs/reference/configuration-and-scheduling.md, "Normalisation".
    """
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching"):
        _prefer_full_batches(config.dynamic_batching, config.max_batch_size)
    if config.HasField("sequence_batching"):
        batcher = config.sequence_batching
        if batcher.HasField("oldest"):
            _prefer_full_batches(batcher.oldest, config.max_batch_size)
        if batcher.max_sequence_idle_microseconds == 0:
            batcher.max_sequence_idle_microseconds = _DEFAULT_IDLE_US
    if not is_ensemble(config):
        for name in ("input_pinned_memory", "output_pinned_memory"):
            if not config.optimization.HasField(name):
                getattr(config.optimization, name).enable = True


def _prefer_full_batches(batcher: ConfigPart, max_batch_size: int) -> None:
    if not batcher.preferred_batch_size and max_batch_size > 0:
        batcher.preferred_batch_size.append(max_batch_size)

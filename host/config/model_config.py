"""Loads the configuration of a model directory: reads it, fills in defaults, and checks it.

What the model itself completes is merged by `host.config.auto_complete`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from host.config.defaults import normalise_config, resolve_backend
from host.config.findings import ConfigSource, Finding, Findings, first_error, raise_first
from host.config.instance_groups import (
    check_instance_groups,
    normalise_instance_groups,
    use_cpu_without_gpus,
)
from host.config.json_form import from_json
from host.config.pbtxt import decode_pbtxt, fill_template, parse_pbtxt_with_source
from host.config.schema import ModelConfig, new_config
from host.config.validate import check_config, check_supported, check_tensors
from host.errors import HostError, internal, invalid_argument
from host.system.files import read_file

# Names are passed to stubs on the command line (docs/reference/model-processes.md,
# "Names of models and instance groups").
_FORBIDDEN_CHARACTERS = frozenset(";|&$`<>()[]{}\\\"'*?~#!")


def check_directory_name(config: ModelConfig, directory: str) -> Findings:
    """Checks that the model is named like its directory
    (docs/reference/configuration-and-scheduling.md, "Names").
    """
    if config.name != directory:
        yield Finding(
            f"unexpected directory name '{directory}' for model '{config.name}', "
            "directory name must equal model name",
            "name",
        )


def check_names_for_stub(config: ModelConfig) -> Findings:
    """Checks that the names of the model and its instance groups have no shell characters."""
    named = [(config.name, "name")]
    named += [(g.name, f"instance_group[{i}].name") for i, g in enumerate(config.instance_group)]
    for name, field in named:
        if not name or not _FORBIDDEN_CHARACTERS.isdisjoint(name):
            yield Finding("Invalid stub name: contains invalid characters", field)


def checked_load_name(name: str) -> str:
    """The model name in a load request, without outer spaces. Raises HostError INVALID_ARG."""
    trimmed = name.strip()
    if not trimmed:
        raise invalid_argument("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise invalid_argument(
            f"invalid model name '{trimmed}', model name must not contain path traversal characters"
        )
    return trimmed


_log = logging.getLogger("pbhost")


AdaptConfig = Callable[[ModelConfig], None]
"""Changes a configuration in place, before defaults are filled in and anything is checked."""


@dataclass(frozen=True, slots=True)
class ConfigSettings:
    """How the configurations of a server's models are read.

    Attributes:
        strict: Configurations must be complete; models do not complete them.
        config_name: Name of the file in `configs/` that is preferred to `config.pbtxt`.
        gpus: Device ids that instances may run on.
        least_capability: Compute capability that these devices have at least.
        cpu_fallback: Whether instance groups of KIND_GPU use the CPU if there are no GPUs.
        variables: Values of the template variables of configuration files.
        adapt: Changes each configuration that was read, before it is checked.
    """

    strict: bool = False
    config_name: str | None = None
    gpus: Sequence[int] = ()
    least_capability: float = 6.0
    cpu_fallback: bool = False
    variables: Mapping[str, str] | None = None
    adapt: AdaptConfig | None = None


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration before the model's `auto_complete_config` has run.

    `source` is None if no file was read. `instance_error` is the reason why the model's versions
    cannot be loaded on this server; other errors are raised by `load_config`. `namespace` is the
    repository's path if model names are local to repositories
    (docs/reference/model-control.md, "Namespaces").
    """

    config: ModelConfig
    source: ConfigSource | None
    instance_error: HostError | None = None
    namespace: str = ""

    def check_instances(self) -> None:
        """Raises `instance_error` if there is one."""
        if self.instance_error is not None:
            raise self.instance_error


def load_config(
    model_dir: Path,
    settings: ConfigSettings,
    *,
    override: str | None = None,
    name: str | None = None,
) -> LoadedConfig:
    """Reads, completes and checks the configuration of a model that does not run yet.

    `override` is JSON that replaces the file. `name` replaces the directory's name if the directory
    is temporary.

    These are steps 2 to 8 of docs/reference/configuration-and-scheduling.md, "From the directory to
    a served model". Raises HostError, but keeps an error of steps 10 and 11 as `instance_error`.
    """
    directory = name if name is not None else model_dir.name
    if override is None:
        path = config_file(model_dir, settings.config_name)
        config, source = _read_file(path, settings.strict, settings.variables)
    else:
        config, source = _read_override(override), None
    if settings.adapt is not None:
        settings.adapt(config)
    if settings.cpu_fallback and not settings.gpus and use_cpu_without_gpus(config):
        _log.warning(
            "model '%s': its instance groups of KIND_GPU run on the CPU, because there is no GPU"
            " (--gpu-fallback=cpu)",
            config.name or directory,
        )
    raise_first(_resolve_and_check(config, model_dir, directory, settings), source)
    instance_error = first_error(_check_servable(config, settings), source)
    return LoadedConfig(config, source, instance_error)


def iterate_findings(
    config: ModelConfig, model_dir: Path, directory: str, settings: ConfigSettings
) -> Findings:
    """Completes the configuration like `load_config`; yields all findings, not only the first."""
    yield from _resolve_and_check(config, model_dir, directory, settings)
    yield from _check_servable(config, settings)


def _resolve_and_check(
    config: ModelConfig, model_dir: Path, directory: str, settings: ConfigSettings
) -> Findings:
    # Bytes that are not UTF-8 become backslash escapes, which can be printed and are not valid in
    # a name: check_names_for_stub rejects them.
    directory = directory.encode(errors="backslashreplace").decode()
    config.name = config.name or directory
    normalise_config(config)
    unresolved = None
    try:
        resolve_backend(config, config.name, model_dir)
    except HostError as error:
        unresolved = Finding(error.message, "backend", error.code)
        yield unresolved
    # A configuration without a backend has no platform; a second finding would not help.
    yield from (one for one in check_config(config) if not (unresolved and one.field == "platform"))
    if settings.strict:
        yield from check_tensors(config)
    yield from check_directory_name(config, directory)
    normalise_instance_groups(config, settings.gpus)


def _check_servable(config: ModelConfig, settings: ConfigSettings) -> Findings:
    """Checks what this server can serve. With a finding, no version of the model is loaded."""
    yield from check_supported(config)
    yield from check_names_for_stub(config)
    yield from check_instance_groups(config, settings.gpus, settings.least_capability)


def config_file(model_dir: Path, config_name: str | None = None) -> Path:
    """The path of the configuration file, which may be missing
    (docs/reference/configuration-and-scheduling.md, "Alternative configuration files").
    """
    if config_name is not None:
        custom = model_dir / "configs" / f"{config_name}.pbtxt"
        if os.path.exists(custom):  # unlike Path.exists, it never raises an error
            return custom
    return model_dir / "config.pbtxt"


def _read_override(override: str) -> ModelConfig:
    try:
        return from_json(override)
    except HostError as error:
        raise HostError(error.code, f"Invalid config override: {error.message}") from None


def _read_file(
    path: Path, strict: bool, variables: Mapping[str, str] | None
) -> tuple[ModelConfig, ConfigSource | None]:
    text = read_config_text(path, strict)
    if text is None:
        return new_config(), None
    if variables is not None:
        text = fill_template(text, variables, str(path))
    return parse_pbtxt_with_source(text, str(path))


def read_unchecked_config(
    model_dir: Path, config_name: str | None = None, variables: Mapping[str, str] | None = None
) -> ModelConfig:
    """Reads the configuration file only; the result is empty without a file. Raises HostError."""
    return _read_file(config_file(model_dir, config_name), False, variables)[0]


def read_config_text(path: Path, strict: bool) -> str | None:
    """Reads a configuration file. Returns None if it does not exist and `strict` is False.

    Raises HostError INTERNAL if the file cannot be read.
    """
    try:
        data = read_file(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not strict:
            return None
        text = f"failed to open text file for read {path}: {error.strerror}"
        raise internal(text) from None
    return decode_pbtxt(data, str(path))

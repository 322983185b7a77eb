"""The way from a model directory to the configuration that the model is served with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from host.config.auto_complete import merge_completed
from host.config.execution import max_concurrent_batches
from host.config.findings import Finding, Findings, first_error, raise_first
from host.config.input_memory import input_memory_message
from host.config.instance_groups import (
    InstanceSpec,
    check_instance_groups,
    instance_specs,
    normalise_instance_groups,
)
from host.config.json_form import from_json
from host.config.names import check_directory_name, check_names_for_stub
from host.config.normalise import normalise_config
from host.config.pbtxt import parse_pbtxt_with_source
from host.config.resolve import first_version_dir, resolve_backend
from host.config.schema import ModelConfig, new_config
from host.config.source import ConfigSource
from host.config.unsupported import check_supported
from host.config.validate import check_config, check_tensors
from host.errors import HostError, internal
from host.system.regular_file import read_file

__all__ = [
    "InstanceSpec",
    "LoadedConfig",
    "ModelConfig",
    "config_file",
    "iterate_findings",
    "complete_config",
    "input_memory_message",
    "instance_specs",
    "load_config",
    "max_concurrent_batches",
    "read_config_text",
]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration as far as it is known without running the model.

    `source` is None when no file was read. `instance_error`: why it cannot be served or its
    instances not be made here, which fails a version, where other errors keep the model from being
    looked at.
    `namespace`: the repository, if several models may have that name (spec 8.9).
    """

    config: ModelConfig
    source: ConfigSource | None
    instance_error: HostError | None = None
    namespace: str = ""

    def check_instances(self) -> None:
        """Raises HostError if they cannot be made."""
        if self.instance_error is not None:
            raise self.instance_error


def load_config(
    model_dir: Path,
    *,
    strict: bool,
    config_name: str | None = None,
    override: str | None = None,
    gpus: Sequence[int] = (),
    least_capability: float = 6.0,
    name: str | None = None,
) -> LoadedConfig:
    """Everything that happens to a configuration before its model is asked to complete it.

    `strict` demands a complete configuration, `config_name` chooses among `configs/`, `override`
    is JSON that replaces the file, and `name` stands in for the directory's name where that
    directory is a temporary one (configuration spec 2.4, steps 2 to 8; of steps 10 and 11 the
    error is kept). `gpus` are those of at least the `least_capability`.
    """
    directory = name if name is not None else model_dir.name
    config, source = _read_config(model_dir, strict, config_name, override)
    raise_first(_resolve_and_check(config, model_dir, directory, strict, gpus), source)
    unplaced = first_error(_check_servable(config, gpus, least_capability), source)
    return LoadedConfig(config, source, unplaced)


def iterate_findings(
    config: ModelConfig,
    model_dir: Path,
    directory: str,
    strict: bool,
    gpus: Sequence[int],
    least_capability: float,
) -> Findings:
    """Fill in what is left out, as `load_config` does, and yield everything that is wrong."""
    yield from _resolve_and_check(config, model_dir, directory, strict, gpus)
    yield from _check_servable(config, gpus, least_capability)


def _resolve_and_check(
    config: ModelConfig, model_dir: Path, directory: str, strict: bool, gpus: Sequence[int]
) -> Findings:
    # What is not UTF-8 cannot be told, and is no name: it gets characters that none may have.
    directory = directory.encode(errors="backslashreplace").decode()
    # What is not UTF-8 cannot be told, and is no name: it gets characters that none may have.
    directory = directory.encode(errors="backslashreplace").decode()
    config.name = config.name or directory
    unresolved = None
    try:
        resolve_backend(config, config.name, first_version_dir(model_dir))
    except HostError as error:
        unresolved = Finding(error.message, "backend", error.code)
        yield unresolved
    normalise_config(config)
    # What is not resolved has no platform either, which needs no saying.
    yield from (one for one in check_config(config) if not (unresolved and one.field == "platform"))
    if strict:
        yield from check_tensors(config)
    yield from check_directory_name(config, directory)
    normalise_instance_groups(config, gpus)


def _check_servable(config: ModelConfig, gpus: Sequence[int], least_capability: float) -> Findings:
    """What a backend says of a model that it is to serve: its version fails, with a reason."""
    yield from check_supported(config)
    yield from check_names_for_stub(config)
    yield from check_instance_groups(config, gpus, least_capability)


def complete_config(
    loaded: LoadedConfig, completed: str | Mapping[str, Any] | ModelConfig | None = None
) -> ModelConfig:
    """The final configuration: with what the model completed, if it did, and checked again."""
    loaded.check_instances()
    config = new_config()
    config.CopyFrom(loaded.config)
    source = loaded.source
    if completed is not None:
        config = merge_completed(loaded.config, completed)
        if source is not None:
            source = source.without_fields(_changed_fields(loaded.config, config))
    raise_first(chain(check_config(config), check_tensors(config), check_supported(config)), source)
    return config


def _changed_fields(before: ModelConfig, after: ModelConfig) -> list[str]:
    """Top-level fields whose content no longer is what the file says."""
    names = [field.name for field in before.DESCRIPTOR.fields]
    return [name for name in names if getattr(before, name) != getattr(after, name)]


def config_file(model_dir: Path, config_name: str | None = None) -> Path:
    """The file that configures the model, which need not exist (configuration spec 1.8)."""
    if config_name is not None:
        custom = model_dir / "configs" / f"{config_name}.pbtxt"
        if custom.exists():
            return custom
    return model_dir / "config.pbtxt"


def _read_config(
    model_dir: Path, strict: bool, config_name: str | None, override: str | None
) -> tuple[ModelConfig, ConfigSource | None]:
    if override is not None:
        try:
            return from_json(override), None
        except HostError as error:
            raise HostError(error.code, f"Invalid config override: {error.message}") from None
    path = config_file(model_dir, config_name)
    text = read_config_text(path, strict)
    return (new_config(), None) if text is None else parse_pbtxt_with_source(text, str(path))


def read_config_text(path: Path, strict: bool) -> str | None:
    """What a file of a configuration says; None if there is none, unless `strict` asks for it.

    Raises HostError INTERNAL if it cannot be read.
    """
    try:
        return read_file(path).decode()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not strict:
            return None
        text = f"failed to open text file for read {path}: {error.strerror}"
        raise internal(text) from None
    except UnicodeDecodeError as error:
        raise internal(f"failed to read text proto from {path}: {error}") from None

"""`pbhost config`: prints the complete configuration of a model, or converts a file."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from host.bls import BlsTargets
from host.cli.arguments import EXIT_FAILED, errors_end, parse_texts
from host.cli.model_arguments import find_model, reject_repository, serve_flag
from host.config.auto_complete import complete_config
from host.config.json_form import from_json, to_dict, to_json
from host.config.model_config import ConfigSettings, LoadedConfig, load_config
from host.config.pbtxt import decode_pbtxt, parse_pbtxt, to_pbtxt
from host.config.schema import ModelConfig, is_ensemble
from host.crashes.records import CrashRecords
from host.environments.model_environments import Environments
from host.errors import HostError, internal, unsupported
from host.health import ServerState
from host.instances.gpus import find_gpus
from host.instances.launchers import SpawnLauncher
from host.instances.pool import StubPool
from host.logs.formats import Label
from host.metrics.custom import CustomMetrics
from host.models.backends import Backends
from host.models.registry import Registry
from host.options.flags import SWITCH, FlagGroup, one_of
from host.options.options import Options
from host.repository.model_directory import list_versions, select_versions
from host.tracing.trace_settings import TraceConfig
from host.tracing.tracer import Tracer
from stub.wire.messages import ModelSource
from stub.wire.paths import absolute_path

_DEFAULTS = Options()
_STOP_SECONDS = 5.0

_ABOUT = """\
Prints the complete configuration that a server would use for a model: defaults are filled in, and
if the model defines auto_complete_config, it is called in a separate process. With a file instead
of a model directory, converts the file to the requested format.

A FILE whose name ends with .json contains JSON; any other file contains the text form of
config.pbtxt. A file is parsed, but not completed or validated. The log and the output of the model
go to stderr.

examples:
  pbhost config models/add_sub
  pbhost config models/add_sub --no-auto-complete --format=json
  pbhost config models/add_sub/config.pbtxt --format=json > add_sub.json
  pbhost config add_sub.json --format=pbtxt > models/add_sub/config.pbtxt

exit status: 0 success; 1 a server would refuse the configuration, or it cannot be read; 2 the
command line is invalid"""

_group = FlagGroup("Configuration")


@dataclass
class ConfigOptions:
    """The flags of `pbhost config`."""

    format: str = _group(
        "pbtxt", "Output format: pbtxt or json.", check=one_of("format", "pbtxt", "json")
    )
    no_auto_complete: bool = _group(False, "Do not complete the configuration.", SWITCH)
    model_config_name: str = serve_flag("model_config_name")
    backend_directory: str = serve_flag("backend_directory")
    repository_cache_directory: str = serve_flag("repository_cache_directory")


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints one configuration and exits."""
    (text,), options = parse_texts(arguments, "config MODEL_DIR|FILE", _ABOUT, ConfigOptions)
    logger = logging.getLogger("pbhost")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    with errors_end("config"):
        try:
            target = find_model(text, options.repository_cache_directory)
            config = _from_folder(target, options) if target.is_dir() else _from_file(target)
        except asyncio.CancelledError:  # by SIGTERM
            sys.exit(EXIT_FAILED)
    if options.format == "json":
        text = json.dumps(to_dict(config), indent=2) + "\n"
    else:
        text = to_pbtxt(config)
    sys.stdout.write(text)
    sys.exit(0)


def _from_file(path: Path) -> ModelConfig:
    """Reads a configuration file. Raises HostError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise internal(f"failed to open text file for read {path}: {error.strerror}") from None
    if path.suffix != ".json":
        return parse_pbtxt(decode_pbtxt(data, str(path)), str(path))
    try:
        return from_json(data.decode())
    except UnicodeDecodeError as error:
        raise internal(f"failed to read {path}: {error}") from None
    except HostError as error:
        raise HostError(error.code, f"{path}: {error.message}") from None


def _from_folder(directory: Path, options: ConfigOptions) -> ModelConfig:
    """Returns the configuration that a server would use for a model. Raises HostError."""
    reject_repository(directory)
    return asyncio.run(_complete_config(Path(absolute_path(str(directory))), options))


async def _complete_config(directory: Path, options: ConfigOptions) -> ModelConfig:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    capability = _DEFAULTS.min_supported_compute_capability
    settings = ConfigSettings(
        config_name=options.model_config_name or None,
        gpus=await find_gpus(capability),
        least_capability=capability,
    )
    loaded = load_config(directory, settings)
    if options.no_auto_complete:
        return loaded.config
    if is_ensemble(loaded.config):
        return complete_config(loaded)
    version = select_versions(loaded.config, list_versions(directory))[-1]
    backends = Backends(Path(options.backend_directory))
    source, loaded = backends.find_backend(directory, version, loaded)
    return complete_config(loaded, await _auto_complete(source, loaded, directory))


async def _auto_complete(source: ModelSource, loaded: LoadedConfig, directory: Path) -> str | None:
    """Calls the model's `auto_complete_config`; returns JSON, None if it changes nothing.

    Raises HostError.
    """
    environments = Environments(
        _DEFAULTS.environment_cache, float(_DEFAULTS.environment_timeout_secs)
    )
    no_targets = BlsTargets(Registry(), ServerState(), Tracer(TraceConfig()))
    pool = StubPool(
        SpawnLauncher(), _DEFAULTS.arena_limit, no_targets, CustomMetrics(), False, CrashRecords(0)
    )
    pool.control = _NoModelControl()
    environment = None
    try:
        environment = await environments.prepare(loaded.config, directory)
        stub = await pool.start_instance(Label(loaded.config.name, source.version), environment)
        completed = await stub.auto_complete(source, to_json(loaded.config))
        await stub.stop(0, _STOP_SECONDS)
        return completed
    finally:
        await pool.close()
        if environment is not None:
            environment.release()
        await environments.close()


class _NoModelControl:
    """Model control without a server: refuses all changes."""

    async def load_for_model(
        self, name: str, config: str, files: dict[str, bytes], requester: str, holder: object
    ) -> None:
        """Raises HostError."""
        raise _no_server_error()

    async def unload_for_model(self, name: str, dependents: bool, holder: object) -> None:
        """Raises HostError."""
        raise _no_server_error()

    def release_holds(self, holder: object) -> None:
        """Does nothing."""

    async def is_ready(self, name: str, version: str) -> bool:
        """Returns False."""
        return False


def _no_server_error() -> HostError:
    return unsupported("models cannot be loaded or unloaded: pbhost config does not start a server")

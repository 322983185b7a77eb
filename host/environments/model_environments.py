"""Prepares the environment that a model's configuration selects."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

from host.config.schema import ModelConfig
from host.environments import requirements as required
from host.environments.environment import Environment, StubSources, check_interpreter
from host.environments.environment_cache import ArchiveCache, EnvironmentBuilder
from host.errors import internal, invalid_argument
from host.system.files import PrivateDirectory

_log = logging.getLogger("pbhost")

PATH_PARAMETER = "EXECUTION_ENV_PATH"
"""The config parameter with the path of an environment."""

_REQUIREMENTS = "PYTHON_REQUIREMENTS"
_MODEL_DIRECTORY_KEYWORD = "$$TRITON_MODEL_DIRECTORY"
_CUSTOM_STUB = "triton_python_backend_stub"


class Environments:
    """Prepares and holds the environments of one server.

    `cache` is the folder for built environments, which later servers reuse. `seconds` is the time
    limit of each step. Raises OSError.
    """

    def __init__(self, cache: Path, seconds: float) -> None:
        self._private_directory = PrivateDirectory()
        self._seconds = seconds
        self._sources = StubSources(_make_directory(self._private_directory.path / "stub_sources"))
        self._extractions = ArchiveCache(
            _make_directory(self._private_directory.path / "python_env"), self._sources, seconds
        )
        self._builder = EnvironmentBuilder(cache, self._sources, seconds)

    async def prepare(self, config: ModelConfig, directory: Path) -> Environment | None:
        """Finds, unpacks or builds the environment of the model in `directory`.

        Returns None if the model runs on the host's Python. Raises HostError.
        """
        _warn_about_custom_stub(config, directory)
        path, file = _environment_parameters(config, directory)
        if path:
            return await self._use_existing(path, directory)
        if file:
            return await self._build(config.name, file, directory)
        return None

    async def _use_existing(self, path: str, directory: Path) -> Environment:
        _log.info("Using Python execution env %s", path)
        canonical, status = await asyncio.to_thread(_resolve_path, path, directory)
        if stat.S_ISDIR(status.st_mode):
            _log.debug(
                "Returning canonical path since %s does not contain compressed path. Path: %s",
                PATH_PARAMETER,
                canonical,
            )
            environment = Environment(canonical, self._sources)
            advice = "Install the missing packages: {pip}"
        elif not stat.S_ISREG(status.st_mode):
            raise internal(f"Cannot unpack {canonical}: it is not a regular file")
        else:
            environment = await self._extractions.get_environment(canonical, status.st_mtime_ns)
            advice = f"Install before packing {canonical}: pip install {{packages}}"
        try:
            await asyncio.to_thread(_check_activate, environment.root)
            return await check_interpreter(environment, self._seconds, advice)
        except BaseException:  # also if cancelled: the caller does not get it
            environment.release()
            raise

    async def _build(self, model: str, value: str, directory: Path) -> Environment:
        path = _path_in_model(model, value, directory)
        requirements = await asyncio.to_thread(required.read_requirements, path, directory)
        environment = await self._builder.get_environment(requirements, model)
        advice = f"Remove {environment.root} to build it again, or run: {{pip}}"
        return await check_interpreter(environment, self._seconds, advice)

    async def close(self) -> None:
        """Cancels running preparations and removes unpacked archives. All stubs must have ended."""
        await self._builder.close()
        await self._extractions.close()
        await asyncio.to_thread(self._private_directory.close)


def needs_environment(config: ModelConfig) -> bool:
    """Whether a model runs on another Python than the host's."""
    return any(_parameter(config, name) for name in (PATH_PARAMETER, _REQUIREMENTS))


def check_environment(config: ModelConfig, directory: Path) -> None:
    """Checks that the environment or requirements file of a configuration exists.

    Prepares nothing. Raises HostError.
    """
    path, file = _environment_parameters(config, directory)
    if path:
        canonical, status = _resolve_path(path, directory)
        if stat.S_ISDIR(status.st_mode):
            _check_activate(canonical)
    elif file:
        required.read_requirements(_path_in_model(config.name, file, directory), directory)


def _environment_parameters(config: ModelConfig, directory: Path) -> tuple[str, str]:
    """The path of the environment or of the requirements file; at least one is empty."""
    path, file = _parameter(config, PATH_PARAMETER), _parameter(config, _REQUIREMENTS)
    if path and file:
        raise invalid_argument(
            f"model '{config.name}' has both parameters {PATH_PARAMETER} and {_REQUIREMENTS};"
            " remove one of them: an environment is either given or built"
        )
    return path.replace(_MODEL_DIRECTORY_KEYWORD, str(directory)), file


def _make_directory(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _parameter(config: ModelConfig, name: str) -> str:
    return str(config.parameters[name].string_value) if name in config.parameters else ""


def _check_activate(root: Path) -> None:
    activate = root / "bin" / "activate"
    if not activate.exists():
        raise internal(
            f"Path {activate} does not exist. The Python environment should contain an 'activate'"
            " script."
        )


def _resolve_path(path: str, directory: Path) -> tuple[Path, os.stat_result]:
    """Resolves a path, relative to the working directory; returns it with its file status."""
    try:
        canonical = Path(path).resolve(strict=True)
        return canonical, canonical.stat()
    except (OSError, RuntimeError, ValueError):
        hint = ""
        if not os.path.isabs(path) and os.path.exists(directory / path):
            hint = f" It is in the model's directory: write {_MODEL_DIRECTORY_KEYWORD}/{path}"
        raise internal(f"Failed to get the canonical path for {path}.{hint}") from None


def _path_in_model(model: str, value: str, directory: Path) -> Path:
    """The path of a file in the model's directory, without `..`; it may be a symbolic link."""
    top = os.path.abspath(directory)
    path = Path(os.path.normpath(os.path.join(top, value.replace(_MODEL_DIRECTORY_KEYWORD, top))))
    if not path.is_relative_to(top) or path == Path(top):
        raise invalid_argument(
            f"{_REQUIREMENTS} of model '{model}' must name a file in the model's directory {top},"
            f" not '{value}'"
        )
    return path


def _warn_about_custom_stub(config: ModelConfig, directory: Path) -> None:
    custom = directory / _CUSTOM_STUB
    if custom.exists():
        _log.warning(
            "model '%s': %s is not used. Custom stub executables are not supported; the model runs"
            " on the Python of %s or on the host's Python",
            config.name,
            custom,
            PATH_PARAMETER,
        )

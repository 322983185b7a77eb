"""From what a model's configuration asks for to the environment that its stubs run in."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

from host.config.schema import ModelConfig
from host.environments import interpreter
from host.environments import requirements as required
from host.environments.building import EnvironmentBuilder
from host.environments.environment import Environment, StubSources
from host.environments.extraction import ArchiveCache
from host.errors import internal, invalid_argument
from host.system.private_directory import PrivateDirectory

_log = logging.getLogger("pbhost")

PATH_PARAMETER = "EXECUTION_ENV_PATH"
"""The parameter that names an environment."""

_REQUIREMENTS = "PYTHON_REQUIREMENTS"
_MODEL_DIRECTORY_KEYWORD = "$$TRITON_MODEL_DIRECTORY"
_CUSTOM_STUB = "triton_python_backend_stub"


class Environments:
    """All environments of one server.

    `cache` is where they are built and kept, and found by later servers; `seconds` bound each step
    of preparing one. Raises OSError.
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
        """The environment of the model in `directory`; None for the host's own Python.

        It is unpacked or built first if need be. Raises HostError.
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
            advice = "Install it there: {pip}"
        elif not stat.S_ISREG(status.st_mode):
            raise internal(f"Cannot unpack {canonical}: it is not a regular file")
        else:
            environment = await self._extractions.get_environment(canonical, status.st_mtime_ns)
            advice = f"Install it before packing {canonical}: pip install {{packages}}"
        try:
            await asyncio.to_thread(_check_activate, environment.root)
            await interpreter.check_interpreter(environment, self._seconds, advice)
        except BaseException:  # also if cancelled: nobody else would let go of it
            environment.release()
            raise
        return environment

    async def _build(self, model: str, value: str, directory: Path) -> Environment:
        path = _path_in_model(model, value, directory)
        requirements = await asyncio.to_thread(required.read_requirements, path)
        environment = await self._builder.get_environment(requirements, model)
        advice = f"Remove {environment.root} to have it built anew, or: {{pip}}"
        await interpreter.check_interpreter(environment, self._seconds, advice)
        return environment

    async def close(self) -> None:
        """All stubs have ended: give up what is under way, and remove what was unpacked."""
        await self._builder.close()
        await self._extractions.close()
        await asyncio.to_thread(self._private_directory.close)


def needs_environment(config: ModelConfig) -> bool:
    """Whether a model asks for another Python than the host's own."""
    return any(_parameter(config, name) for name in (PATH_PARAMETER, _REQUIREMENTS))


def check_environment(config: ModelConfig, directory: Path) -> None:
    """See whether what a configuration says of its environment is there. Prepares nothing.

    Raises HostError.
    """
    path, file = _environment_parameters(config, directory)
    if path:
        canonical, status = _resolve_path(path, directory)
        if stat.S_ISDIR(status.st_mode):
            _check_activate(canonical)
    elif file:
        required.read_requirements(_path_in_model(config.name, file, directory))


def _environment_parameters(config: ModelConfig, directory: Path) -> tuple[str, str]:
    """The environment that is meant, or else the file that says what to install in one."""
    path, file = _parameter(config, PATH_PARAMETER), _parameter(config, _REQUIREMENTS)
    if path and file:
        raise invalid_argument(
            f"model '{config.name}' has both parameters {PATH_PARAMETER} and {_REQUIREMENTS};"
            " an environment is either there or built, remove one of them"
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
    """Where a path leads, seen from the working directory, and what is there."""
    try:
        canonical = Path(path).resolve(strict=True)
        return canonical, canonical.stat()
    except (OSError, RuntimeError, ValueError):
        hint = ""
        if not os.path.isabs(path) and os.path.exists(directory / path):
            hint = f" It is in the model's directory: write {_MODEL_DIRECTORY_KEYWORD}/{path}"
        raise internal(f"Failed to get the canonical path for {path}.{hint}") from None


def _path_in_model(model: str, value: str, directory: Path) -> Path:
    """The file that is meant; its name may not lead out of the model's directory. Links may."""
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
            "model '%s': %s is not used. Stubs are no executables here: they run on the Python of"
            " %s, or else on the host's",
            config.name,
            custom,
            PATH_PARAMETER,
        )

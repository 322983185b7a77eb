"""Builds environments from the requirements of models, and caches them for later servers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from host.environments.environment import Environment, StubSources
from host.environments.program import ProgramError, command_dying_with_host, run_program
from host.environments.requirements import Requirements
from host.environments.single_flight import SingleFlight
from host.errors import internal, invalid_argument

_log = logging.getLogger("pbhost")

_COMPLETION_FILE = "pbhost.json"
"""The file that marks an environment as complete; it is written last."""

_PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
_HIDDEN = "its output is not shown, because the requirements include a file from another machine"
_LOCK_POLL_SECONDS = 0.2  # between attempts to lock an environment that another server builds
_WRONG_PYTHON_STATUS = 3

_CHECK_PYTHON_SCRIPT = f"""\
import sys
from pip._vendor.packaging.specifiers import SpecifierSet
found = "%d.%d.%d" % sys.version_info[:3]
allowed = SpecifierSet(sys.argv[1]).contains(found, prereleases=True)
sys.exit(0 if allowed else {_WRONG_PYTHON_STATUS})
"""


class EnvironmentBuilder:
    """Builds environments in `cache`, a folder that several servers may share.

    `seconds` is the time limit of each build step.
    """

    def __init__(self, cache: Path, sources: StubSources, seconds: float) -> None:
        self._cache = cache
        self._sources = sources
        self._seconds = seconds
        self._single_flight: SingleFlight[Environment] = SingleFlight()

    async def get_environment(self, requirements: Requirements, model: str) -> Environment:
        """Finds or builds the environment for the requirements. Raises HostError.

        `model` is the name of the model, for the log and for errors.
        """
        key = requirements.key
        return await self._single_flight.run_once(
            key, lambda: self._find_or_build(key, requirements, model)
        )

    async def _find_or_build(self, key: str, requirements: Requirements, model: str) -> Environment:
        environment = Environment(self._cache / key, self._sources)
        if _is_complete(environment):
            return environment
        async with self._lock(key) as lock:
            if not _is_complete(environment):  # another server may have built it meanwhile
                await self._build(environment, requirements, model, lock)
        return environment

    @asynccontextmanager
    async def _lock(self, key: str) -> AsyncIterator[int]:
        """Locks the environment of a key against other servers; yields the lock's file descriptor.

        Raises HostError INTERNAL if the lock cannot be taken within the time limit.
        """
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(
                self._cache / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise internal(
                f"cannot build environments in {self._cache}: {error.strerror};"
                " set another folder with --environment-cache-dir"
            ) from error
        try:
            while not _try_lock(lock):
                if asyncio.get_running_loop().time() > deadline:
                    raise internal(
                        f"another server has been building {self._cache / key} for"
                        f" {self._seconds:g} s, the limit of --environment-timeout-secs"
                    )
                await asyncio.sleep(_LOCK_POLL_SECONDS)
            yield lock
        finally:
            os.close(lock)

    async def _build(
        self, environment: Environment, requirements: Requirements, model: str, lock: int
    ) -> None:
        root, source = environment.root, requirements.path
        _log.info("building the Python environment %s from %s", root, source)
        variables = environment.variables(os.environ)
        variables.pop("PYTHONPATH", None)

        def log_line(line: str) -> None:
            if not requirements.remote:
                _log.info("%s", line, extra={"instance": model})

        async def step(name: str, command: Sequence[str]) -> None:
            await run_program(
                command,
                name=name,
                timeout_s=self._seconds,
                variables=variables,
                cwd=source.parent,  # relative paths in the file refer to its folder
                on_line=log_line,
                inherited_fds=[lock],  # the lock is held until the last of these processes ends
            )

        try:
            await asyncio.to_thread(shutil.rmtree, root, True)
            await step("python -m venv", command_dying_with_host(sys.executable, "venv", root))
            if requirements.python:
                await _check_python(step, environment, requirements)
            pip = ["pip", "install", *_PIP_OPTIONS, *requirements.arguments]
            await step("pip install", command_dying_with_host(environment.python, *pip))
            await asyncio.to_thread(_mark_complete, environment, requirements)
        except BaseException as error:  # also if cancelled: remove an incomplete environment
            await asyncio.to_thread(shutil.rmtree, root, True)
            if not isinstance(error, (ProgramError, OSError)):
                raise
            reason = str(error)
            if isinstance(error, ProgramError):
                reason = f"{error}; {_HIDDEN}" if requirements.remote else error.details
            raise internal(
                f"cannot build the environment of model '{model}' from {source}: {reason}"
            ) from error

    async def close(self) -> None:
        """Cancels the running builds."""
        await self._single_flight.close()


def _is_complete(environment: Environment) -> bool:
    return (environment.root / _COMPLETION_FILE).exists()


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mark_complete(environment: Environment, requirements: Requirements) -> None:
    """Writes the completion file, which records the requirements. Raises OSError."""
    files = {name: data.decode(errors="replace") for name, data in requirements.files.items()}
    content = json.dumps({"source": str(requirements.path), "files": files}, indent=1)
    fresh = environment.root / f"{_COMPLETION_FILE}.new"
    fresh.write_text(content)
    fresh.rename(environment.root / _COMPLETION_FILE)


async def _check_python(
    step: Callable[[str, Sequence[str]], Awaitable[None]],
    environment: Environment,
    requirements: Requirements,
) -> None:
    """Raises HostError INVALID_ARG if `requires-python` excludes the Python of the environment."""
    allowed = requirements.python
    try:
        command = [str(environment.python), "-I", "-c", _CHECK_PYTHON_SCRIPT, allowed]
        await step("the check of requires-python", command)
    except ProgramError as failure:
        if failure.status != _WRONG_PYTHON_STATUS:
            raise
        raise invalid_argument(
            f"cannot use the requirements {requirements.path}: requires-python is '{allowed}',"
            f" and environments are built with the host's Python {platform.python_version()}"
        ) from None

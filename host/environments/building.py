"""Environments built from what models want installed, once, and kept for later servers."""

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

from host.environments.environment import Environment
from host.environments.program import ProgramFailed, run, under_host
from host.environments.requirements import Requirements
from host.environments.single_flight import SingleFlight
from host.environments.sources import Sources
from host.errors import internal, invalid_argument

_log = logging.getLogger("pbhost")

_MARK = "pbhost.json"
"""Written last: an environment without it was never finished."""

_QUIETLY = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
_LOOK_SECONDS = 0.2  # between looks whether another server has built what we want
_WRONG_PYTHON = 3

_ALLOWS = f"""\
import sys
from pip._vendor.packaging.specifiers import SpecifierSet
found = "%d.%d.%d" % sys.version_info[:3]
sys.exit(0 if SpecifierSet(sys.argv[1]).contains(found, prereleases=True) else {_WRONG_PYTHON})
"""


class Builder:
    """Builds below `cache`, which servers may share; `seconds` bound one build."""

    def __init__(self, cache: Path, sources: Sources, seconds: float) -> None:
        self._cache = cache
        self._sources = sources
        self._seconds = seconds
        self._flights: SingleFlight[Environment] = SingleFlight()

    async def open(self, requirements: Requirements, model: str) -> Environment:
        """The environment that has what is required. Raises HostError.

        `model` is for whom it is built, should it not be there yet.
        """
        key = requirements.key
        return await self._flights.get(key, lambda: self._open(key, requirements, model))

    async def _open(self, key: str, requirements: Requirements, model: str) -> Environment:
        environment = Environment(self._cache / key, self._sources)
        if _is_whole(environment):
            return environment
        async with self._locked(key) as lock:
            if not _is_whole(environment):  # else another server was faster
                await self._build(environment, requirements, model, lock)
        return environment

    @asynccontextmanager
    async def _locked(self, key: str) -> AsyncIterator[int]:
        """Be the only one who builds this; the descriptor of the lock. Raises HostError."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(
                self._cache / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise internal(
                f"cannot build environments in {self._cache}: {error.strerror};"
                " --environment-cache-dir chooses another folder"
            ) from error
        try:
            while not _taken(lock):
                if asyncio.get_running_loop().time() > deadline:
                    raise internal(
                        f"another server has been building {self._cache / key} for"
                        f" {self._seconds:g} s, the limit of --environment-timeout-secs"
                    )
                await asyncio.sleep(_LOOK_SECONDS)
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

        async def step(name: str, command: Sequence[str]) -> None:
            await run(
                command,
                name=name,
                seconds=self._seconds,
                variables=variables,
                cwd=source.parent,  # relative paths in the file are meant from there
                heard=lambda line: _log.info("%s", line, extra={"instance": model}),
                inherited=[lock],  # as long as one of them runs, nobody else builds
            )

        try:
            await asyncio.to_thread(shutil.rmtree, root, True)
            await step("python -m venv", under_host(sys.executable, "venv", root))
            if requirements.python:
                await _check_python(step, environment, requirements)
            pip = ["pip", "install", *_QUIETLY, *requirements.arguments]
            await step("pip install", under_host(environment.python, *pip))
            await asyncio.to_thread(_finish, environment, requirements)
        except BaseException as error:  # also if cancelled: half of one must not stay
            await asyncio.to_thread(shutil.rmtree, root, True)
            if not isinstance(error, (ProgramFailed, OSError)):
                raise
            reason = error.told if isinstance(error, ProgramFailed) else str(error)
            raise internal(
                f"cannot build the environment of model '{model}' from {source}: {reason}"
            ) from error

    async def close(self) -> None:
        """Give up what is under way."""
        await self._flights.close()


def _is_whole(environment: Environment) -> bool:
    return (environment.root / _MARK).exists()


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _finish(environment: Environment, requirements: Requirements) -> None:
    """Say what was built, which makes it a whole one. Raises OSError."""
    files = {name: data.decode(errors="replace") for name, data in requirements.files.items()}
    told = json.dumps({"source": str(requirements.path), "files": files}, indent=1)
    fresh = environment.root / f"{_MARK}.new"
    fresh.write_text(told)
    fresh.rename(environment.root / _MARK)


async def _check_python(
    step: Callable[[str, Sequence[str]], Awaitable[None]],
    environment: Environment,
    requirements: Requirements,
) -> None:
    """Raise HostError INVALID_ARG if a project does not want the Python that it would get."""
    allowed = requirements.python
    try:
        look = [str(environment.python), "-I", "-c", _ALLOWS, allowed]
        await step("the look at requires-python", look)
    except ProgramFailed as failure:
        if failure.status != _WRONG_PYTHON:
            raise
        raise invalid_argument(
            f"cannot use the requirements {requirements.path}: requires-python is '{allowed}',"
            f" and environments are built with the host's Python {platform.python_version()}"
        ) from None

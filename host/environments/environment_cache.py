"""Environments on disk: built from requirements or unpacked from archives, once for all models."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from host.environments import archive as unpacker
from host.environments.environment import Environment, StubSources
from host.environments.program import ProgramError, command_dying_with_host, run_program
from host.environments.requirements import Requirements
from host.errors import internal, invalid_argument, unavailable
from host.system.files import try_lock

_STOPPING = "the server is stopping"

_Result = TypeVar("_Result")


class SingleFlight(Generic[_Result]):
    """Callers with the same key share one run of the work, and its result or error."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[_Result]] = {}
        self._closed = False

    async def run_once(self, key: Hashable, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Runs the work, or waits for a run with the same key that has not ended.

        Cancelling one caller does not cancel the work. Raises the work's exception, and HostError
        UNAVAILABLE after `close`.
        """
        if self._closed:
            raise unavailable(_STOPPING)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(work())
            task.add_done_callback(lambda done: self._on_done(key, done))
        await asyncio.wait([task])
        if task.cancelled():
            raise unavailable(_STOPPING)
        return task.result()

    def _on_done(self, key: Hashable, task: asyncio.Future[_Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the callers may be cancelled

    async def close(self) -> None:
        """Cancels all running work and waits for its end."""
        self._closed = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


_log = logging.getLogger("pbhost")


class Extraction:
    """An unpacked archive. `changed` is the archive's modification time in nanoseconds."""

    def __init__(self, archive: Path, changed: int, root: Path) -> None:
        self.archive = archive
        self.changed = changed
        self.root = root
        self.users = 0


class ArchiveCache:
    """Unpacks archives into subfolders of `folder`, which nothing else uses.

    `seconds` is the time limit of each step.
    """

    def __init__(self, folder: Path, sources: StubSources, seconds: float) -> None:
        self._folder = folder
        self._sources = sources
        self._seconds = seconds
        self._count = 0
        self._current: dict[Path, Extraction] = {}
        self._single_flight: SingleFlight[Extraction] = SingleFlight()
        self._removals: set[asyncio.Future[None]] = set()

    async def get_environment(self, archive: Path, changed: int) -> Environment:
        """Unpacks the archive at a canonical path, unless this has been done. Raises HostError.

        `changed` is the archive's modification time in nanoseconds. An archive that has changed is
        unpacked again; the old folder is removed when no model uses it any more.
        """
        extraction = self._current.get(archive)
        if extraction is None or extraction.changed != changed:
            extraction = await self._single_flight.run_once(
                (archive, changed), lambda: self._extract(archive, changed)
            )
        extraction.users += 1
        return Environment(
            extraction.root, self._sources, partial(self._release_extraction, extraction)
        )

    async def _extract(self, archive: Path, changed: int) -> Extraction:
        _log.debug("Extracting Python execution env %s", archive)
        root = self._folder / str(self._count)
        self._count += 1
        try:
            await asyncio.to_thread(root.mkdir)
            await self._extract_archive(archive, root)
            await self._relocate(Environment(root, self._sources))
        except ProgramError as failure:
            await asyncio.to_thread(shutil.rmtree, root, True)
            raise internal(
                f"Failed to extract the Python execution env {archive}: {failure.details}"
            ) from failure
        except BaseException:  # also if cancelled: remove an incomplete folder
            await asyncio.to_thread(shutil.rmtree, root, True)
            raise
        before = self._current.get(archive)
        extraction = self._current[archive] = Extraction(archive, changed, root)
        if before is not None:
            self._remove_if_unused(before)
        return extraction

    async def _extract_archive(self, archive: Path, root: Path) -> None:
        command = command_dying_with_host(sys.executable, unpacker.__file__, archive, root)
        try:
            await run_program(command, name="unpacking", timeout_s=self._seconds)
        except ProgramError as failure:
            if failure.status == 1 and len(failure.output) == 1:
                raise ProgramError(failure.output[0]) from None  # the only line is the reason
            raise

    async def _relocate(self, environment: Environment) -> None:
        """Runs `conda-unpack`, if there is one: it rewrites the paths in the environment."""
        script = environment.root / "bin" / "conda-unpack"
        if script.is_file():
            await run_program(
                command_dying_with_host(environment.python, script),
                name=str(script),
                timeout_s=self._seconds,
                variables=environment.variables(os.environ),
            )

    def _release_extraction(self, extraction: Extraction) -> None:
        extraction.users -= 1
        self._remove_if_unused(extraction)

    def _remove_if_unused(self, extraction: Extraction) -> None:
        """Removes an old, unused folder. The newest one is kept for later models."""
        if extraction.users or self._current[extraction.archive] is extraction:
            return
        removal = asyncio.ensure_future(asyncio.to_thread(shutil.rmtree, extraction.root, True))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Cancels running extractions. The caller removes the folder."""
        await self._single_flight.close()
        if self._removals:
            await asyncio.wait(self._removals)


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
            while not try_lock(lock):
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

"""Unpacks archives of environments, once for all models that use the same archive."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from host.environments import archive as unpacker
from host.environments.environment import Environment, StubSources
from host.environments.program import ProgramError, command_dying_with_host, run_program
from host.environments.single_flight import SingleFlight
from host.errors import internal

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

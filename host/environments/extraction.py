"""Archives of environments, unpacked once for all models that name them."""

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
    """An unpacked archive. `changed` is when the archive was, in nanoseconds."""

    def __init__(self, archive: Path, changed: int, root: Path) -> None:
        self.archive = archive
        self.changed = changed
        self.root = root
        self.users = 0


class ArchiveCache:
    """Unpacks below `folder`, which is its own; `seconds` bound each step."""

    def __init__(self, folder: Path, sources: StubSources, seconds: float) -> None:
        self._folder = folder
        self._sources = sources
        self._seconds = seconds
        self._count = 0
        self._current: dict[Path, Extraction] = {}
        self._single_flight: SingleFlight[Extraction] = SingleFlight()
        self._removals: set[asyncio.Future[None]] = set()

    async def get_environment(self, archive: Path, changed: int) -> Environment:
        """The environment in an archive, given by its canonical path. Raises HostError.

        `changed` is when the archive was, in nanoseconds.
        It is unpacked again if the archive has changed. What was unpacked earlier stays as long as
        models run there.
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
        except BaseException:  # also if cancelled: nobody else would remove it
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
            await run_program(command, name="the unpacking", timeout_s=self._seconds)
        except ProgramError as failure:
            if failure.status == 1 and len(failure.output) == 1:
                raise ProgramError(failure.output[0]) from None  # it says it best itself
            raise

    async def _relocate(self, environment: Environment) -> None:
        """Have what conda-pack packed get used to its new place."""
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
        """The newest one is kept for models to come."""
        if extraction.users or self._current[extraction.archive] is extraction:
            return
        removal = asyncio.ensure_future(asyncio.to_thread(shutil.rmtree, extraction.root, True))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Give up what is under way; the folder is its owner's to remove."""
        await self._single_flight.close()
        if self._removals:
            await asyncio.wait(self._removals)

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
from host.environments.environment import Environment
from host.environments.program import ProgramFailed, run, under_host
from host.environments.single_flight import SingleFlight
from host.environments.sources import Sources
from host.errors import internal

_log = logging.getLogger("pbhost")


class Extraction:
    """An unpacked archive. `changed` is when the archive was, in nanoseconds."""

    def __init__(self, archive: Path, changed: int, root: Path) -> None:
        self.archive = archive
        self.changed = changed
        self.root = root
        self.users = 0


class Extractions:
    """Unpacks below `folder`, which is its own; `seconds` bound each step."""

    def __init__(self, folder: Path, sources: Sources, seconds: float) -> None:
        self._folder = folder
        self._sources = sources
        self._seconds = seconds
        self._count = 0
        self._current: dict[Path, Extraction] = {}
        self._flights: SingleFlight[Extraction] = SingleFlight()
        self._removals: set[asyncio.Future[None]] = set()

    async def open(self, archive: Path, changed: int) -> Environment:
        """The environment in an archive, given by its canonical path. Raises HostError.

        `changed` is when the archive was, in nanoseconds.
        It is unpacked again if the archive has changed. What was unpacked earlier stays as long as
        models run there.
        """
        extraction = self._current.get(archive)
        if extraction is None or extraction.changed != changed:
            extraction = await self._flights.get(
                (archive, changed), lambda: self._extract(archive, changed)
            )
        extraction.users += 1
        return Environment(extraction.root, self._sources, partial(self._release, extraction))

    async def _extract(self, archive: Path, changed: int) -> Extraction:
        _log.debug("Extracting Python execution env %s", archive)
        root = self._folder / str(self._count)
        self._count += 1
        try:
            await asyncio.to_thread(root.mkdir)
            await self._unpack(archive, root)
            await self._relocate(Environment(root, self._sources))
        except ProgramFailed as failure:
            await asyncio.to_thread(shutil.rmtree, root, True)
            raise internal(
                f"Failed to extract the Python execution env {archive}: {failure.told}"
            ) from failure
        except BaseException:  # also if cancelled: nobody else would remove it
            await asyncio.to_thread(shutil.rmtree, root, True)
            raise
        before = self._current.get(archive)
        extraction = self._current[archive] = Extraction(archive, changed, root)
        if before is not None:
            self._remove_unless_needed(before)
        return extraction

    async def _unpack(self, archive: Path, root: Path) -> None:
        command = under_host(sys.executable, unpacker.__file__, archive, root)
        try:
            await run(command, name="the unpacking", seconds=self._seconds)
        except ProgramFailed as failure:
            if failure.status == 1 and len(failure.output) == 1:
                raise ProgramFailed(failure.output[0]) from None  # it says it best itself
            raise

    async def _relocate(self, environment: Environment) -> None:
        """Have what conda-pack packed get used to its new place."""
        script = environment.root / "bin" / "conda-unpack"
        if script.is_file():
            await run(
                under_host(environment.python, script),
                name=str(script),
                seconds=self._seconds,
                variables=environment.variables(os.environ),
            )

    def _release(self, extraction: Extraction) -> None:
        extraction.users -= 1
        self._remove_unless_needed(extraction)

    def _remove_unless_needed(self, extraction: Extraction) -> None:
        """The newest one is kept for models to come."""
        if extraction.users or self._current[extraction.archive] is extraction:
            return
        removal = asyncio.ensure_future(asyncio.to_thread(shutil.rmtree, extraction.root, True))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Give up what is under way; the folder is its owner's to remove."""
        await self._flights.close()
        if self._removals:
            await asyncio.wait(self._removals)

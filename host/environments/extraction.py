"""Archives of environments, unpacked once for all models that name them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import weakref
from pathlib import Path

from host.environments import archive as unpacker
from host.environments.environment import Environment
from host.environments.program import ProgramFailed, run, under_host
from host.environments.sharing import Sharing
from host.environments.sources import Sources
from host.errors import internal

_log = logging.getLogger("pbhost")


class Extraction:
    """An unpacked archive; its folder goes when nobody holds this any more."""

    def __init__(self, root: Path, changed: int) -> None:
        self.root = root
        self.changed = changed


class Extractions:
    """Unpacks below `folder`, which is its own; `seconds` bound each step."""

    def __init__(self, folder: Path, sources: Sources, seconds: float) -> None:
        self._folder = folder
        self._sources = sources
        self._seconds = seconds
        self._count = 0
        self._current: dict[Path, Extraction] = {}
        self._sharing: Sharing[Extraction] = Sharing()
        self._removals: set[asyncio.Future[None]] = set()
        self._finalizers: dict[Path, weakref.finalize[..., Extraction]] = {}

    async def open(self, archive: Path, changed: int) -> Environment:
        """The environment in an archive, given by its canonical path. Raises HostError.

        `changed` is when the archive was, in nanoseconds.
        It is unpacked again if the archive has changed. What was unpacked earlier stays as long as
        models run there.
        """
        extraction = self._current.get(archive)
        if extraction is None or extraction.changed != changed:
            extraction = await self._sharing.get(
                (archive, changed), lambda: self._extract(archive, changed)
            )
        return Environment(extraction.root, self._sources, extraction)

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
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, root, True)
            raise
        extraction = self._current[archive] = Extraction(root, changed)
        self._remove_when_unused(extraction)
        return extraction

    async def _unpack(self, archive: Path, root: Path) -> None:
        command = under_host(sys.executable, unpacker.__file__, archive, root)
        try:
            await run(command, seconds=self._seconds)
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
                seconds=self._seconds,
                variables=environment.variables(os.environ),
            )

    def _remove_when_unused(self, extraction: Extraction) -> None:
        loop = asyncio.get_running_loop()
        # A finaliser runs anywhere, in any thread: it only leaves word.
        finalizer = weakref.finalize(
            extraction, loop.call_soon_threadsafe, self._remove, extraction.root
        )
        finalizer.atexit = False
        self._finalizers[extraction.root] = finalizer

    def _remove(self, root: Path) -> None:
        del self._finalizers[root]
        removal = asyncio.ensure_future(asyncio.to_thread(shutil.rmtree, root, True))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Give up what is under way; the folder is its owner's to remove."""
        await self._sharing.close()
        for finalizer in self._finalizers.values():
            finalizer.detach()
        if self._removals:
            await asyncio.wait(self._removals)

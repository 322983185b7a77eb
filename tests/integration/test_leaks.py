"""A server releases its resources: descriptors, threads, processes, memory."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

import pbhost
from tests.conftest import ALL, RepositoryBuilder
from tests.integration.test_kills import Bench, run, serving
from tests.waiting import eventually

REQUESTS = int(os.environ.get("PBHOST_LEAK_REQUESTS", "2000" if ALL else "500"))
TURNS = 22 if ALL else 10
MIB = 1 << 20


@dataclass
class Holdings:
    """The resources that this process holds now."""

    descriptors: Counter[str]
    threads: Counter[str]
    children: int
    shared: set[str]

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        this = psutil.Process()
        names: Counter[str] = Counter()
        for number in os.listdir("/proc/self/fd"):
            try:
                name = os.readlink(f"/proc/self/fd/{number}")
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
            names[name.split(":[")[0]] += 1
        own = {str(path) for path in Path("/dev/shm").glob("pbhost*")}
        folder = Path(tempfile.gettempdir())
        own |= {str(path) for path in folder.glob(f"pbhost-*{os.getpid()}*")}
        # The event loop's own workers come as they are needed, up to a number, and stay.
        threads = Counter(
            thread.name for thread in threading.enumerate() if "asyncio_" not in thread.name
        )
        return cls(names, threads, len(this.children(recursive=True)), own)

    def beyond(self, before: Holdings) -> list[str]:
        """The resources that are held now and were not held before."""
        more = [
            f"{count} x {name}" for name, count in (self.descriptors - before.descriptors).items()
        ]
        more += [f"thread {name}" for name in self.threads - before.threads]
        more += [f"{self.children} children"] * (self.children > before.children)
        return more + sorted(self.shared - before.shared)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


async def nothing_beyond(before: Holdings, what: str) -> None:
    await eventually(
        lambda: not Holdings.now().beyond(before), what, state=lambda: Holdings.now().beyond(before)
    )


async def and_then_nothing_is_left(serve: Callable[[], Awaitable[None]]) -> None:
    before = Holdings.now()
    await serve()
    await nothing_beyond(before, "what the server took to be given back")


async def one_request(bench: Bench, chance: random.Random) -> str:
    """Successful, refused, failed in the model, or cancelled while they run."""
    kind = chance.choice(
        ["right", "right", "right", "ask", "refused", "unknown", "raises", "cancelled"]
    )
    array = np.full(chance.choice([1, 100, 1000, 5000, 60_000]), chance.random(), dtype=np.float32)
    infer = bench.server.infer
    if kind == "refused":
        with pytest.raises(pbhost.HostError, match="unexpected"):
            await infer("identity", {"INPUT9": array})
    elif kind == "unknown":
        with pytest.raises(pbhost.HostError, match="unknown model"):
            await infer("missing", {"INPUT0": array})
    elif kind == "raises":
        with pytest.raises(pbhost.HostError, match="on purpose"):
            await infer("fails", {"INPUT0": array})
    elif kind == "cancelled":
        task = asyncio.ensure_future(infer("identity", {"INPUT0": array}))
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    else:
        inputs = {"INPUT0": array}
        if kind == "ask":
            inputs["MODEL"] = np.array(["identity"], dtype=np.object_)
        result = await infer("ask" if kind == "ask" else "identity", inputs)
        np.testing.assert_array_equal(result["OUTPUT0"], array)
    return kind


async def many_requests(bench: Bench, count: int, chance: random.Random) -> None:
    left = count

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            bench.outcomes[await one_request(bench, chance)] += 1

    await asyncio.gather(*(client() for _ in range(16)))


FAILS = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("on purpose")
"""


def add_models(repository: RepositoryBuilder) -> None:
    repository.copy("identity", "ask")
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    repository.add("fails", FAILS, config)


def test_requests_of_every_outcome_leave_nothing_behind(repository: RepositoryBuilder) -> None:
    add_models(repository)

    async def serve() -> None:
        async with serving(repository, log_warning=False) as bench:
            chance = random.Random(1)
            await many_requests(bench, REQUESTS // 4, chance)
            await bench.assert_no_memory_held()
            before, memory = Holdings.now(), resident()
            await many_requests(bench, REQUESTS, chance)
            assert set(bench.outcomes) > {"right", "cancelled", "raises"}
            await bench.assert_no_memory_held()
            await nothing_beyond(before, "what the requests took to be given back")
            assert resident() - memory < 32 * MIB
            bench.assert_no_faults()

    run(and_then_nothing_is_left(serve))


def test_loading_and_unloading_leaves_nothing_behind(repository: RepositoryBuilder) -> None:
    add_models(repository)

    async def serve() -> None:
        async with serving(
            repository, model_control_mode="explicit", load_model=["identity", "ask"]
        ) as bench:
            before: Holdings | None = None
            memory = 0
            core, pool = bench.server.core, bench.server._open_components.pool
            for turn in range(TURNS):
                await core.control.load_model("fails", {})
                with pytest.raises(pbhost.HostError, match="on purpose"):
                    await bench.server.infer("fails", {"INPUT0": np.ones(20_000, dtype=np.float32)})
                await bench.assert_answers("ask", 5000)
                await core.control.unload_model("fails", False)
                await eventually(lambda: len(pool._instances) == 2, "the stub to end")
                if turn == 1:
                    before, memory = Holdings.now(), resident()
            assert before is not None
            await nothing_beyond(before, "what the models took to be given back")
            await bench.assert_no_memory_held()
            assert resident() - memory < 16 * MIB
            assert len(pool.arenas._files) == len(pool.arenas.on_closed) == 2
            bench.assert_no_faults()

    run(and_then_nothing_is_left(serve))


def test_crashes_leave_nothing_behind(repository: RepositoryBuilder) -> None:
    add_models(repository)
    repository.copy("misbehave")

    async def serve() -> None:
        async with serving(repository, log_warning=False, quarantine_secs=0) as bench:

            async def crash(how: str) -> None:
                command = np.array([how], dtype=np.object_)
                with pytest.raises(pbhost.HostError, match="is not healthy"):
                    await bench.server.infer("misbehave", {"COMMAND": command})
                await eventually(
                    lambda: len(bench.serving_instances("misbehave")) == 1, "a new stub"
                )
                echo = np.array(["echo x"], dtype=np.object_)
                await bench.server.infer("misbehave", {"COMMAND": echo})

            await crash("segfaults")
            before = Holdings.now()
            for how in ["aborts", "segfaults"] * 3:
                await crash(how)
            await bench.assert_answers("identity", 60_000)
            await nothing_beyond(before, "what the stubs took to be given back")
            bench.assert_no_faults()

    run(and_then_nothing_is_left(serve))


def test_failed_starts_leave_nothing_behind(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    repository.add("broken", "import no_such_library\n")

    async def start() -> None:
        with pytest.raises(pbhost.HostError, match="failed to load all models"):
            async with serving(repository):
                pass

    async def main() -> None:
        await start()
        before = Holdings.now()
        for _ in range(3):
            await start()
        await nothing_beyond(before, "what the servers took to be given back")

    run(main())

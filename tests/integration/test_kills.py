"""Stubs killed or stopped at any moment, and stubs that break their own connection."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

import host
from host.instances.instance import Instance
from host.instances.supervisor import LaneState
from tests.conftest import RepositoryBuilder

ROUNDS = int(os.environ.get("PBHOST_KILL_ROUNDS", "24"))
SEED = int(os.environ.get("PBHOST_KILL_SEED", "1"))
CALL_SECONDS = 60.0
"""No call may take longer, whatever happens to its stub."""

SIZES = (1, 100, 4000, 30_000, 400_000)  # elements: inline, in a block, too long for a ring
TWO_LANES = "instance_group [ { count: 2, kind: KIND_CPU } ]"


async def eventually(
    condition: Callable[[], bool],
    what: str,
    seconds: float = 60.0,
    state: Callable[[], object] = lambda: "",
) -> None:
    """Return once the condition holds; fail with `what` and the state when the time is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, f"waited {seconds} s in vain for {what} {state()}"
        await asyncio.sleep(0.01)


class Log(logging.Handler):
    """Everything that the host has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Bench:
    """A server in this process whose stubs are within reach."""

    def __init__(self, server: host.Server) -> None:
        self.server = server
        self.log = Log()
        self.faults: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def lanes(self, name: str) -> list[Instance]:
        assert self.server._lifecycle is not None
        (model,) = [each for each in self.server._lifecycle.models() if each.name == name]
        return [lane.instance for lane in model.lanes if lane.state is LaneState.SERVING]

    def pids(self, name: str) -> list[int]:
        processes = [instance._process for instance in self.lanes(name)]
        return [process.pid for process in processes if process is not None]

    def states(self) -> list[str]:
        """Every lane, for whoever looks into a failure."""
        assert self.server._lifecycle is not None
        return [
            f"{lane.instance.name}: {lane.state}, {lane.instance._session.state}, {lane.reason}"
            f" after {lane._deaths} deaths"
            for model in self.server._lifecycle.models()
            for lane in model.lanes
        ]

    async def ask(self, model: str, count: int) -> str:
        """Ask for an array back; what became of it."""
        array = np.random.default_rng(count).random(count, dtype=np.float32)
        inputs = {"INPUT0": array}
        if model.startswith("ask"):
            inputs["MODEL"] = np.array(["identity"], dtype=np.object_)
        try:
            result = await asyncio.wait_for(self.server.infer(model, inputs), CALL_SECONDS)
        except host.HostError as error:
            assert error.code in (host.ErrorCode.UNAVAILABLE, host.ErrorCode.INTERNAL), error
            assert "is not healthy" in error.message or "not ready" in error.message, error
            outcome = error.code.value
        else:
            np.testing.assert_array_equal(result["OUTPUT0"], array)
            outcome = "answered"
        self.outcomes[outcome] += 1
        return outcome

    async def must_answer(self, model: str, count: int = 1000) -> None:
        assert await self.ask(model, count) == "answered"

    async def recovered(self, model: str, lanes: int) -> None:
        """The model has all of its lanes, and each of them has answered."""
        await eventually(lambda: len(self.lanes(model)) == lanes, f"the lanes of {model}")
        await asyncio.gather(*(self.must_answer(model) for _ in range(lanes)))

    async def nothing_is_held(self) -> None:
        """All tensor memory of host and stubs has been given back, and nothing is on loan."""
        pool = self.server._pool
        assert pool is not None
        own = pool.arenas

        def held() -> dict[str, int]:
            found = {
                "host used": own.host.used,
                "host warm": own.host.warm,
                "host memory": os.fstat(own.host_fd).st_blocks,
            }
            for stub in pool._alive:
                found[f"lent to {stub.name}"] = len(stub._transfer._lent)
                found[f"memory of {stub.name}"] = os.fstat(stub._arena.fd).st_blocks
            return {what: amount for what, amount in found.items() if amount}

        await eventually(lambda: not held(), "memory to be given back", 20, held)

    def assert_no_faults(self) -> None:
        assert not self.faults
        assert not [line for line in self.log.lines if "broke the protocol" in line]


@asynccontextmanager
async def serving(repository: RepositoryBuilder, **more: object) -> AsyncIterator[Bench]:
    settings = {"allow_grpc": False, "log_info": False, "log_error": False, **more}
    options = host.Options(model_repository=[str(repository.path)], **settings)  # type: ignore[arg-type]
    async with host.Server(options) as server:
        bench = Bench(server)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: bench.faults.append(str(context)))
        logging.getLogger("pbhost").addHandler(bench.log)
        try:
            yield bench
        finally:
            logging.getLogger("pbhost").removeHandler(bench.log)
        assert bench.server.core.live()


def run(main: Awaitable[None]) -> None:
    async def within_a_deadline() -> None:
        await main

    asyncio.run(within_a_deadline())


def add_two_lane_ask(repository: RepositoryBuilder) -> None:
    repository.copy("ask")
    config = repository.path / "ask" / "config.pbtxt"
    config.write_text(config.read_text() + TWO_LANES)


async def some_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def one_round(bench: Bench, chance: random.Random) -> None:
    """Load on two models, a stub of one of them hit at some moment of it."""
    victim = chance.choice(["identity", "ask"])
    signals = chance.choice(["kill", "kill", "stop and go", "stop and kill"])
    load = [
        asyncio.ensure_future(bench.ask(chance.choice(["identity", "ask"]), chance.choice(SIZES)))
        for _ in range(chance.choice([0, 1, 4, 20]))
    ]
    ended = chance.randrange(len(load) + 1)
    while load and sum(task.done() for task in load) < ended:
        await asyncio.wait(
            [task for task in load if not task.done()], return_when=asyncio.FIRST_COMPLETED
        )
    await some_turns(chance.choice([0, 1, 2, 5, 10, 50, 200]))
    pids = bench.pids(victim)
    if pids:
        pid = chance.choice(pids)
        if signals != "kill":
            os.kill(pid, signal.SIGSTOP)
            await bench.must_answer("witness")
        os.kill(pid, signal.SIGCONT if signals == "stop and go" else signal.SIGKILL)
    await bench.must_answer("witness")
    outcomes = await asyncio.gather(*load)
    if pids and signals != "stop and go":
        await eventually(lambda: pid not in bench.pids(victim), "the death to be noticed")
    else:
        assert set(outcomes) <= {"answered"}
    await bench.recovered("identity", 1)
    await bench.recovered("ask", 2)


@pytest.mark.timeout(120 + 5 * ROUNDS)
def test_kills_and_stops_at_any_moment_cost_only_the_calls_of_that_stub(
    repository: RepositoryBuilder,
) -> None:
    """Every call ends: right, or UNAVAILABLE or INTERNAL and saying why. Nothing stays held."""
    repository.copy("identity")
    add_two_lane_ask(repository)
    identity = repository.path / "identity"
    repository.add(
        "witness",
        (identity / "1" / "model.py").read_text(),
        (identity / "config.pbtxt").read_text(),
    )

    async def main() -> None:
        async with serving(repository) as bench:
            for number in range(ROUNDS):
                chance = random.Random(SEED * 1_000_003 + number)
                try:
                    await one_round(bench, chance)
                except BaseException:
                    print(f"round {number} of seed {SEED}", *bench.log.lines[-20:], sep="\n")
                    print(*bench.states(), sep="\n")
                    raise
                assert bench.server.core.ready()
            print(dict(bench.outcomes))
            await bench.nothing_is_held()
            bench.assert_no_faults()

    run(main())

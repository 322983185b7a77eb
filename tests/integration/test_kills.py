"""Stubs killed or stopped at any moment, and stubs that break their own connection."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import numpy as np
import pytest

import pbhost
from host.instances import supervisor
from host.instances.instance import Instance
from host.instances.supervisor import InstanceState
from host.models.python_model import PythonModel
from tests.conftest import MODELS, RepositoryBuilder
from tests.waiting import eventually

ROUNDS = int(os.environ.get("PBHOST_KILL_ROUNDS", "24"))
SEED = int(os.environ.get("PBHOST_KILL_SEED", "1"))
CALL_SECONDS = 120.0
"""No call may take longer, whatever happens to its stub."""

SIZES = (1, 100, 4000, 30_000, 400_000)  # elements: inline, in a block, too long for a ring
TWO_INSTANCES = "instance_group [ { count: 2, kind: KIND_CPU } ]"


class Log(logging.Handler):
    """Everything that the host has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Bench:
    """A server in this process whose stubs are within reach."""

    def __init__(self, server: pbhost.Server) -> None:
        self.server = server
        self.log = Log()
        self.faults: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def living_models(self) -> list[PythonModel]:
        models: list[PythonModel] = []
        for model in self.server._open_components.lifecycle.living_models():
            assert isinstance(model, PythonModel)
            models.append(model)
        return models

    def serving_instances(self, name: str) -> list[Instance]:
        (model,) = [each for each in self.living_models() if each.name == name]
        return [
            instance.instance
            for instance in model.supervisors
            if instance.state is InstanceState.SERVING
        ]

    def pids(self, name: str) -> list[int]:
        processes = [instance._process for instance in self.serving_instances(name)]
        return [process.pid for process in processes if process is not None]

    def states(self) -> list[str]:
        """Describes every instance, to help to find the cause of a failure."""
        return [
            f"{known.instance.name}: {known.state}, {known.instance.session.protocol.state},"
            f" {known.reason} after {known._backoff.exits} deaths"
            for model in self.living_models()
            for known in model.supervisors
        ]

    async def send_request(self, model: str, count: int) -> str:
        """Asks for an array back; what became of it."""
        array = np.random.default_rng(count).random(count, dtype=np.float32)
        inputs = {"INPUT0": array}
        if model.startswith("ask"):
            inputs["MODEL"] = np.array(["identity"], dtype=np.object_)
        try:
            result = await asyncio.wait_for(self.server.infer(model, inputs), CALL_SECONDS)
        except pbhost.HostError as error:
            assert error.code in (pbhost.ErrorCode.UNAVAILABLE, pbhost.ErrorCode.INTERNAL), error
            assert "is not healthy" in error.message or "not ready" in error.message, error
            outcome: str = error.code.value
        else:
            np.testing.assert_array_equal(result["OUTPUT0"], array)
            outcome = "answered"
        self.outcomes[outcome] += 1
        return outcome

    async def assert_answers(self, model: str, count: int = 1000) -> None:
        assert await self.send_request(model, count) == "answered"

    async def recovered(self, model: str, instances: int) -> None:
        """The model has all of its instances, and each of them has responded."""
        await eventually(
            lambda: len(self.serving_instances(model)) == instances, f"the instances of {model}"
        )
        await asyncio.gather(*(self.assert_answers(model) for _ in range(instances)))

    async def assert_no_memory_held(self) -> None:
        """All tensor memory of host and stubs has been given back, and no block is exported."""
        own = self.server._open_components.pool.arenas

        def held() -> dict[str, int]:
            gc.collect()  # an error refers to its call, and its traceback to itself
            found = {
                "host used": own.host.used,
                "host warm": own.host.warm,
                "host memory": os.fstat(own.host_fd).st_blocks,
            }
            for stub in self.server._open_components.pool._instances:
                found[f"lent to {stub.name}"] = len(stub.session.transfer._exported)
                found[f"memory of {stub.name}"] = os.fstat(stub.session.transfer.arena.fd).st_blocks
            return {what: amount for what, amount in found.items() if amount}

        await eventually(lambda: not held(), "memory to be given back", state=held)

    def assert_no_faults(self) -> None:
        assert not self.faults
        assert not [line for line in self.log.lines if "broke the protocol" in line]


@asynccontextmanager
async def serving(repository: RepositoryBuilder, **more: object) -> AsyncIterator[Bench]:
    quiet = {"log_info": False, "log_error": False}
    endpoints = {"allow_grpc": False, "allow_http": False, "allow_metrics": False}
    settings = {**endpoints, **quiet, **more}
    options = pbhost.Options(model_repository=[str(repository.path)], **settings)  # type: ignore[arg-type]  # each key has its own type
    async with pbhost.Server(options) as server:
        bench = Bench(server)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: bench.faults.append(str(context)))
        logging.getLogger("pbhost").addHandler(bench.log)
        try:
            yield bench
        finally:
            logging.getLogger("pbhost").removeHandler(bench.log)
            loop.set_exception_handler(None)  # it would hold the server
        assert bench.server.core.health.live()


def run(main: Awaitable[None]) -> None:
    async def in_loop() -> None:
        await main

    asyncio.run(in_loop())
    gc.collect()  # the descriptors of stubs that are gone


def add_caller_with_two_instances(repository: RepositoryBuilder) -> None:
    repository.copy("ask")
    config = repository.path / "ask" / "config.pbtxt"
    config.write_text(config.read_text() + TWO_INSTANCES)


async def some_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def one_round(bench: Bench, chance: random.Random) -> None:
    """Loads on two models, a stub of one of them hit at some moment of it."""
    victim = chance.choice(["identity", "ask"])
    signals = chance.choice(["kill", "kill", "stop and go", "stop and kill"])
    load = [
        asyncio.ensure_future(
            bench.send_request(chance.choice(["identity", "ask"]), chance.choice(SIZES))
        )
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
            await bench.assert_answers("witness")
        os.kill(pid, signal.SIGCONT if signals == "stop and go" else signal.SIGKILL)
    await bench.assert_answers("witness")
    outcomes = await asyncio.gather(*load)
    if pids and signals != "stop and go":
        await eventually(lambda: pid not in bench.pids(victim), "the death to be noticed")
    else:
        assert set(outcomes) <= {"answered"}
    await bench.recovered("identity", 1)
    await bench.recovered("ask", 2)


@pytest.mark.timeout(300 + 5 * ROUNDS)
def test_killed_or_stopped_stub_fails_only_its_own_requests(
    repository: RepositoryBuilder,
) -> None:
    """Every call ends: right, or UNAVAILABLE or INTERNAL and saying why. Nothing stays held."""
    repository.copy("identity")
    add_caller_with_two_instances(repository)
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
                except BaseException:  # after any failure, this shows its cause
                    print(f"round {number} of seed {SEED}", *bench.log.lines[-20:], sep="\n")
                    print(*bench.states(), sep="\n")
                    raise
                assert await bench.server.core.health.ready()
            print(dict(bench.outcomes))
            await bench.assert_no_memory_held()
            bench.assert_no_faults()

    run(main())


@pytest.mark.parametrize(("proven", "in_a_row"), [(0.0, 1), (600.0, 3)])
def test_deaths_after_long_service_do_not_count_in_a_row(
    repository: RepositoryBuilder, monkeypatch: pytest.MonkeyPatch, proven: float, in_a_row: int
) -> None:
    monkeypatch.setattr(supervisor, "_PROVEN_SECONDS", proven)
    repository.copy("identity")

    async def main() -> None:
        async with serving(repository) as bench:
            (model,) = bench.living_models()
            (known,) = model.supervisors

            async def kill() -> None:
                restarts = known.restarts
                os.kill(bench.pids("identity")[0], signal.SIGKILL)
                await eventually(lambda: known.restarts > restarts, "another process")

            for _ in range(3):
                await kill()
            assert known._backoff.exits == in_a_row

    run(main())


STUB_INTERNALS_MODEL = """
import gc, os, struct
import triton_python_backend_utils as pb_utils
from stub.stub_channel import Channel
from stub.wire.messages import *
from stub.wire.messages import *

channel = next(each for each in gc.get_objects() if isinstance(each, Channel))


def announce(count=1):
    os.write(channel._host_event, count.to_bytes(8, "little"))


class TritonPythonModel:
    def execute(self, requests):
        if pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").shape() == [7]:
            {attack}
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]
            )
            for request in requests
        ]
"""
PROTOCOL_VIOLATIONS = {
    "announces frames that are not there": "announce(3)",
    "writes a frame that is none": "channel._ring.try_write(b'\\xc1 garbage'); announce()",
    "writes a length that is too long": (
        "struct.pack_into('<I', channel._ring._memory, 64 + channel._ring.written, 1 << 31);"
        " announce()"
    ),
    "writes a long frame that is none": ("announce(channel._ring.write(b'\\xc1' * (1 << 18)))"),
    "says hello again": "channel._ring.try_write(encode([Hello()])); announce()",
    "returns what it was not lent": "channel.send([BlockRelease([(0, 1 << 40, 1)])])",
    "answers a batch that it does not have": "channel.send([Response(1 << 40, 0, None)])",
    "answers a request that its batch does not have": "channel.send([Response(1, 99, None)])",
    "refers to memory that is not there": (
        "channel.send([Response(1, 0, WireResponse("
        "[WireTensor('OUTPUT0', 11, [1], None, 0, 1 << 40, 4)], {}))])"
    ),
    "answers with a datatype that does not exist": (
        "channel.send([Response(1, 0, WireResponse([WireTensor('OUTPUT0', 99, [0], b'')], {}))])"
    ),
    "answers with an error code that does not exist": (
        "channel.send([Response(1, 0, WireResponse([], {}, WireError(99, 'x')))])"
    ),
    "closes its descriptors": "os.closerange(3, 1000)",
}


def test_stub_violating_the_protocol_is_killed_and_replaced(repository: RepositoryBuilder) -> None:
    """Its call is answered or says what became of it, others continue, and it is replaced."""
    repository.copy("identity")
    config = (repository.path / "identity" / "config.pbtxt").read_text()
    names = {}
    for number, (what, attack) in enumerate(PROTOCOL_VIOLATIONS.items()):
        names[f"attack{number}"] = what
        repository.add(f"attack{number}", STUB_INTERNALS_MODEL.format(attack=attack), config)

    async def main() -> None:
        async with serving(repository, log_warning=False) as bench:
            for name, what in names.items():
                (before,) = bench.pids(name)
                await bench.send_request(name, 7)
                await bench.assert_answers("identity")
                await eventually(
                    lambda: bench.pids(name) not in ([], [before]),  # noqa: B023
                    f"the end of a stub that {what}",
                )
                await bench.assert_answers(name)
            assert not bench.faults
            await bench.assert_no_memory_held()

    run(main())


def test_unannounced_frames_from_a_stub_are_ignored(
    repository: RepositoryBuilder,
) -> None:
    config = (MODELS / "identity" / "config.pbtxt").read_text()
    attack = (
        "from pb_utils import _runtime;"
        " receive = channel.receive_service; channel.receive_service ="
        " lambda *given: (channel._service.send(b'garbage'), receive(*given))[1];"
        " _runtime.current()._wake()"  # the thread to which the socket belongs
    )
    repository.add("talks", STUB_INTERNALS_MODEL.format(attack=attack), config)

    async def main() -> None:
        async with serving(repository) as bench:
            await bench.assert_answers("talks", 7)
            await bench.assert_answers("talks")
            bench.assert_no_faults()

    run(main())


def test_exit_timeout_aborts_requests_whose_client_is_gone(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("misbehave")

    async def main() -> None:
        async with serving(repository, log_info=True, stub_grace_secs=1e6) as bench:
            server = bench.server
            given = {"COMMAND": np.array([b"loops"], dtype=np.object_)}
            asked = asyncio.ensure_future(server.infer("misbehave", given))
            await eventually(lambda: "looping" in bench.log.lines, "the model to loop")
            lifecycle = server._open_components.lifecycle
            asked.cancel()
            unloading = asyncio.ensure_future(lifecycle.unload_all())
            await some_turns(2)  # the model waits for its stub, or is about to
            lifecycle.abort_all(pbhost.HostError(pbhost.ErrorCode.UNAVAILABLE, "the time is over"))
            await asyncio.wait_for(unloading, CALL_SECONDS)

    run(main())

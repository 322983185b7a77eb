"""How many calls are prefetched to a stub, and by which stubs."""

from __future__ import annotations

import asyncio

import pytest

from host.errors import unavailable
from host.inference.call import Call
from host.inference.request import InferRequest
from host.instances.instance import Instance
from host.instances.pool import StubPool
from host.instances.stub_process import RestartBackoff
from host.instances.supervisor import Supervisor, prefetch_limit, reclaimable_limit
from host.logs.formats import Label
from host.scheduling.direct import DirectScheduler
from tests.conftest import DEADLINE
from tests.unit.host.stub_peer import PeerLauncher, echo, initialize_message, stub_pool
from tests.waiting import eventually


@pytest.mark.parametrize(
    ("batch_ns", "calls"),
    [(0, 64), (60_000, 64), (100_000, 40), (499_999, 8), (2_000_001, 1), (10**10, 1)],
)
def test_prefetch_is_limited_to_four_milliseconds_of_work_and_64_calls(
    batch_ns: int, calls: int
) -> None:
    assert prefetch_limit(batch_ns) == calls


@pytest.mark.parametrize(
    ("mean_ns", "finds_core", "calls"),
    [
        (0, True, 10),
        (25_000, True, 5),
        (99_999, True, 2),
        (0, False, 64),
        (99_999, False, 32),
        (100_000, True, 0),
        (100_000, False, 0),
    ],
)
def test_prefetch_of_one_of_several_instances_is_limited_to_what_starts_soon(
    mean_ns: float, finds_core: bool, calls: int
) -> None:
    """250 µs of work with 25 µs more for each call, or 4 ms if no other instance finds a core."""
    assert reclaimable_limit(mean_ns, finds_core) == calls


@pytest.mark.parametrize("fast", [False, True])
def test_stub_that_has_exited_accepts_no_prefetch(fast: bool) -> None:
    async def launch() -> Instance:
        raise unavailable("there is no other stub")

    async def test(pool: StubPool, launcher: PeerLauncher) -> None:
        instance = await pool.start_instance(Label("m", 1, "m_0"))
        await instance.initialize(initialize_message())
        supervisor = Supervisor(instance, launch, DirectScheduler(), lambda batches: None)
        call = Call(InferRequest("m", []))

        def accepts() -> bool:
            return (
                supervisor.accepts_reclaimable(call, 0, True)
                if fast
                else supervisor.accepts_next(call)
            )

        if fast:
            supervisor._mean_ns = 0
        assert accepts()
        launcher.peers[-1].exit()
        await eventually(lambda: bool(instance.exit_reason), "the end of the stub")
        assert not accepts()

    async def main() -> None:
        launcher = PeerLauncher(echo)
        async with stub_pool(launcher) as pool:
            await asyncio.wait_for(test(pool, launcher), DEADLINE)

    asyncio.run(main())


def test_pauses_grow_with_each_end_in_a_row_up_to_a_limit() -> None:
    backoff = RestartBackoff(0.5, 3.0, 600.0)
    pauses = []
    for _ in range(6):
        backoff.process_exited()
        pauses.append(backoff.pause)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_ends_in_a_row_has_a_pause() -> None:
    backoff = RestartBackoff(0.5, 3.0, 600.0)
    backoff.exits = 10_000
    assert backoff.pause == 3.0


def test_an_end_after_long_service_begins_a_new_row() -> None:
    backoff = RestartBackoff(0.5, 3.0, 0.0)
    for _ in range(3):
        backoff.process_exited()
    assert (backoff.exits, backoff.pause) == (1, 0.0)

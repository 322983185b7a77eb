"""What a cancellation does to a server that is stopping."""

from __future__ import annotations

import asyncio

import pytest

from host.server.server import _run_to_end


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancellation_takes_effect_at_the_end_also_of_work_that_fails(fails: bool) -> None:
    async def test() -> None:
        started, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        failure = OSError("a disk is full")

        async def work() -> None:
            started.set()
            await go.wait()
            ended.set()
            if fails:
                raise failure

        async def stop() -> BaseException | None:
            """Returns the cause of the cancellation, which a task of Python 3.10 leaves out."""
            with pytest.raises(asyncio.CancelledError) as caught:
                await _run_to_end(work())
            return caught.value.__cause__

        stopping = asyncio.ensure_future(stop())
        await started.wait()
        stopping.cancel()
        go.set()
        assert await stopping is (failure if fails else None)
        assert ended.is_set()

    asyncio.run(test())

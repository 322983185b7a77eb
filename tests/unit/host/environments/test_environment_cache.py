"""Environments on disk: built from requirements or unpacked from archives, once for all models."""

from __future__ import annotations

import asyncio

import pytest

from host.environments.environment_cache import SingleFlight
from host.errors import HostError, internal


class Work:
    """Work that counts its runs and ends when told."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.go.wait()
        return number


def test_concurrent_callers_share_one_run_and_later_callers_start_a_new_one() -> None:
    async def main() -> None:
        flights, work = SingleFlight[int](), Work()
        first = [asyncio.ensure_future(flights.run_once("k", work)) for _ in range(3)]
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(*first) == [1, 1, 1]
        assert await flights.run_once("k", work) == 2
        assert await flights.run_once("other", work) == 3

    asyncio.run(main())


def test_cancelling_one_caller_does_not_stop_the_others() -> None:
    async def main() -> None:
        flights, work = SingleFlight[int](), Work()
        one, other = (asyncio.ensure_future(flights.run_once("k", work)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        work.go.set()
        assert await other == 1
        assert one.cancelled()

    asyncio.run(main())


def test_all_concurrent_callers_get_an_error_and_it_is_not_remembered() -> None:
    async def main() -> None:
        flights = SingleFlight[int]()

        async def fail() -> int:
            raise internal("broken")

        asked = [flights.run_once("k", fail) for _ in range(2)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(result) for result in results] == ["broken", "broken"]
        work = Work()
        work.go.set()
        assert await flights.run_once("k", work) == 1

    asyncio.run(main())


def test_closing_cancels_the_work_and_its_callers_get_an_error() -> None:
    async def main() -> None:
        flights, work = SingleFlight[int](), Work()
        asked = asyncio.ensure_future(flights.run_once("k", work))
        await asyncio.sleep(0)
        await flights.close()
        with pytest.raises(HostError, match="the server is stopping"):
            await asked
        with pytest.raises(HostError, match="the server is stopping"):
            await flights.run_once("k", work)

    asyncio.run(main())

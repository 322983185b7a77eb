"""Questions for the status of Ray Serve."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.conftest import DEADLINE

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


def test_callers_share_one_question_even_if_one_gives_up() -> None:
    from host.ray.replica_channels import ServeStatusReader

    asked: list[int] = []
    answer = threading.Event()

    def ask() -> int:
        asked.append(1)
        assert answer.wait(DEADLINE)
        return len(asked)

    async def main() -> None:
        reader = ServeStatusReader(ask)
        impatient = asyncio.ensure_future(reader.read())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        others = [asyncio.ensure_future(reader.read()) for _ in range(3)]
        await asyncio.sleep(0)
        answer.set()
        assert await asyncio.gather(*others) == [1, 1, 1]
        assert await reader.read() == 2

    asyncio.run(main())


def test_an_error_is_raised_for_its_callers_alone() -> None:
    from host.ray.replica_channels import ServeStatusReader

    answers = iter([ValueError("no controller")])

    def ask() -> str:
        for error in answers:
            raise error
        return "status"

    async def main() -> None:
        reader = ServeStatusReader(ask)
        with pytest.raises(ValueError, match="no controller"):
            await reader.read()
        assert await reader.read() == "status"

    asyncio.run(main())

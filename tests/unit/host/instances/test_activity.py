"""What an instance does now, and the Python stacks of its stub."""

from __future__ import annotations

import asyncio
import os

import pytest

from host.errors import ErrorCode, HostError
from host.instances.activity import StackReading
from stub.wire import messages as m


def test_callers_share_a_reading_in_progress() -> None:
    async def main() -> None:
        sent: list[m.DescribeStacks] = []
        reading = StackReading(sent.append)
        first = asyncio.create_task(reading.read(os.getpid()))
        second = asyncio.create_task(reading.read(os.getpid()))
        await asyncio.sleep(0)
        assert sent == [m.DescribeStacks(1)]
        reading.handle_stacks(m.Stacks(1, ["thread MainThread:"]))
        assert await first == await second == ["thread MainThread:"]
        third = asyncio.create_task(reading.read(os.getpid()))
        await asyncio.sleep(0)
        reading.handle_stacks(m.Stacks(1, ["late"]))
        reading.handle_stacks(m.Stacks(2, ["new"]))
        assert await third == ["new"]
        reading.handle_stacks(m.Stacks(2, ["again"]))

    asyncio.run(main())


def test_a_reading_ends_with_its_stub() -> None:
    async def main() -> None:
        reading = StackReading(lambda message: None)
        waiting = asyncio.create_task(reading.read(os.getpid()))
        await asyncio.sleep(0)
        reading.stub_exited()
        with pytest.raises(HostError, match="the process has ended") as raised:
            await waiting
        assert raised.value.code is ErrorCode.UNAVAILABLE
        reading.stub_exited()

    asyncio.run(main())

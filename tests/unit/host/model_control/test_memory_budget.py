"""The memory budget of models: usage, admission of loads, and eviction of idle models."""

from __future__ import annotations

import asyncio
import os

from host.instances.gpus import GpuMemory
from host.model_control.memory_budget import MemoryUsage, ModelMemory


def test_those_who_ask_while_memory_is_measured_share_the_next_measurement() -> None:
    """A model may grow after a measurement has read it, and then ask what it uses."""

    async def ask() -> tuple[list[ModelMemory], int]:
        began: list[asyncio.Event] = []

        async def read_gpu_memory() -> GpuMemory:
            gate = asyncio.Event()
            began.append(gate)
            first.set()
            await gate.wait()
            return {os.getpid(): {0: len(began)}}

        first = asyncio.Event()
        usage = MemoryUsage(lambda: {"m": [os.getpid()]}, read_gpu_memory)
        asked = [asyncio.create_task(usage.measure())]
        await first.wait()
        asked += [asyncio.create_task(usage.measure()) for _ in range(2)]
        await asyncio.sleep(0)  # they have asked
        first.clear()
        began[0].set()
        await first.wait()
        began[1].set()
        return await asyncio.gather(*asked), len(began)

    found, count = asyncio.run(asyncio.wait_for(ask(), 30))
    assert [memory["m"]["gpu0"] for memory in found] == [1, 2, 2]
    assert count == 2

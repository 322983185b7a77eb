"""Measures the memory of each model: its processes, and what they use of each GPU."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from host.environments.program import ProgramError
from host.instances.gpu_memory import GpuMemory
from host.system.resident_memory import processes_of_groups, proportional_bytes

_log = logging.getLogger("pbhost")

HOST = "host"
"""The name of the host's memory, beside those of GPUs: "gpu0", "gpu1" and so on."""

Memory = dict[str, int]
"""Bytes by device: `HOST`, or the name of a GPU."""

ModelMemory = dict[str, Memory]
"""The memory of each model that has processes, by the model's name."""


def gpu_name(number: int) -> str:
    """The name of a GPU among devices."""
    return f"gpu{number}"


class _Processes(Protocol):
    """Knows the processes of models."""

    def process_ids(self) -> dict[str, list[int]]:
        """The process ids by the name of the model."""
        ...


class MemoryUsage:
    """Measures the processes of all models, with those that models have started themselves.

    Belongs to the event loop. `read_gpu_memory`: None if no GPU is of interest.
    """

    def __init__(
        self, pool: _Processes, read_gpu_memory: Callable[[], Awaitable[GpuMemory]] | None
    ) -> None:
        self._pool = pool
        self._read_gpu_memory = read_gpu_memory
        self._lock = asyncio.Lock()
        self._began = 0  # when the last measurement began, in nanoseconds, monotonic
        self.last: ModelMemory = {}
        """The last measurement."""

    async def measure(self) -> ModelMemory:
        """The memory of each model now: no measurement that began before the call.

        Callers that ask while another measurement runs share the next one.
        """
        asked = time.monotonic_ns()
        async with self._lock:
            if self._began <= asked:
                began = time.monotonic_ns()
                gpus = await self._measure_gpus()
                stubs = self._pool.process_ids()
                self.last = await asyncio.to_thread(_measure_processes, stubs, gpus)
                self._began = began
            return self.last

    async def _measure_gpus(self) -> GpuMemory:
        if self._read_gpu_memory is None:
            return {}
        try:
            return await self._read_gpu_memory()
        except ProgramError as error:
            _log.error("the memory of GPUs is unknown, and counts as unused: %s", error.details)
            return {}


def _measure_processes(stubs: dict[str, list[int]], gpus: GpuMemory) -> ModelMemory:
    groups = processes_of_groups({pid for pids in stubs.values() for pid in pids})
    found: ModelMemory = {}
    for name, leaders in stubs.items():
        memory = found[name] = {HOST: 0}
        for pid in (pid for leader in leaders for pid in {leader, *groups[leader]}):
            memory[HOST] += proportional_bytes(pid)
            for number, used in gpus.get(pid, {}).items():
                memory[gpu_name(number)] = memory.get(gpu_name(number), 0) + used
    return found

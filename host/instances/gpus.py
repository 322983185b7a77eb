"""Finds the GPUs that instances may run on, and reads how much of their memory processes use."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable

from host.environments.program import ProgramError, command_dying_with_host, run_program
from pb_utils import _gpu

_log = logging.getLogger("pbhost")

_TIMEOUT = 60.0  # a driver that initialises eight GPUs takes some of these


async def find_gpus(min_capability: float) -> list[int]:
    """The numbers of the GPUs that this host can use, as CUDA counts them.

    GPUs of less compute capability are left out, and CUDA_VISIBLE_DEVICES applies. Another process
    looks, as a process that has used CUDA cannot fork processes that use it. If that fails, the
    result is empty and the log says why.
    """
    if not _gpu.is_installed():
        return []
    try:
        capabilities = await _query_driver()
    except ProgramError as failure:
        _log.warning("GPUs are not used: %s", failure.details)
        return []
    usable = [number for number, value in capabilities.items() if value >= min_capability]
    for number, value in capabilities.items():
        left_out = "" if number in usable else ", which is not enough; it is not used"
        _log.info("GPU %d has CUDA compute capability %.1f%s", number, value, left_out)
    return usable


async def _query_driver() -> dict[int, float]:
    """The compute capability of each GPU. Raises ProgramError."""
    output = await run_program(
        command_dying_with_host(sys.executable, _gpu.__file__),
        name="the search for GPUs",
        timeout_s=_TIMEOUT,
        timeout_source="the most that a driver may take",
    )
    found = json.loads(output[-1])
    if "error" in found:
        raise ProgramError(found["error"])
    return {number: float(f"{major}.{minor}") for number, (major, minor) in found["gpus"]}


GpuMemory = dict[int, dict[int, int]]
"""Bytes by process id, and then by the number of the GPU."""

_TIMEOUT_S = 10.0


async def read_gpu_memory() -> GpuMemory:
    """The memory that processes use on all GPUs now. Raises ProgramError.

    GPUs are numbered by their PCI bus, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    devices = await _query("--query-gpu=index,uuid")
    return parse_gpu_memory(devices, await _query("--query-compute-apps=pid,gpu_uuid,used_memory"))


async def _query(what: str) -> list[str]:
    lines: list[str] = []
    await run_program(
        ["nvidia-smi", what, "--format=csv,noheader,nounits"],
        timeout_s=_TIMEOUT_S,
        timeout_source="the most that a measurement may take",
        on_line=lines.append,
    )
    return lines


def parse_gpu_memory(devices: Iterable[str], processes: Iterable[str]) -> GpuMemory:
    """Parses the lines of `nvidia-smi`: `index, uuid` of GPUs, and `pid, uuid, MiB` of processes.

    A process whose memory the driver does not tell (`[N/A]`) counts as 0.
    """
    numbers: dict[str, int] = {}
    for line in devices:
        index, _, uuid = (part.strip() for part in line.partition(","))
        if index.isdecimal():  # otherwise it is a warning of the program
            numbers[uuid] = int(index)
    found: GpuMemory = {}
    for line in processes:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not parts[0].isdecimal() or parts[1] not in numbers:
            continue  # a message of the program, such as that no process runs
        used = int(parts[2]) << 20 if parts[2].isdecimal() else 0
        memory = found.setdefault(int(parts[0]), {})
        device = numbers[parts[1]]
        memory[device] = memory.get(device, 0) + used
    return found

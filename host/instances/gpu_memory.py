"""Reads how much memory of each GPU each process uses, from `nvidia-smi`."""

from __future__ import annotations

from collections.abc import Iterable

from host.environments.program import run_program

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

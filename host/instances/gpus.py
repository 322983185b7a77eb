"""Finds the GPUs that instances may run on."""

from __future__ import annotations

import json
import logging
import sys

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

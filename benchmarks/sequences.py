"""Measures the sequence scheduler's cost per request for growing numbers of live sequences.

    python -m benchmarks.sequences [--instructions]

Fake instances answer at once, so only the scheduler is measured. `--instructions` counts
instructions with callgrind (valgrind); the count does not depend on what else the machine does. It
takes two minutes.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.page import table_row
from host.config.schema import pb
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.scheduling.scheduler import InstanceSlot
from host.scheduling.sequence_call import END, START, SequenceCall
from host.scheduling.sequence_scheduler import SequenceScheduler, sequence_scheduler

LIVE = (100, 1_000, 10_000, 100_000)
_TIMED = 20_000  # requests
_COUNTED = 400


class _FakeInstance(InstanceSlot):
    def __init__(self) -> None:
        self.batch: Sequence[Call] = ()

    def run(self, calls: Sequence[Call]) -> None:
        self.batch = calls

    def drain_prefetched(self) -> Sequence[Call]:
        return ()


def _send(scheduler: SequenceScheduler, number: int, flags: int) -> None:
    call = SequenceCall(InferRequest("m", [], correlation_id=number, flags=flags))
    call.queued_ns = call.received_ns
    scheduler.submit(call)


def _serve(scheduler: SequenceScheduler, instance: _FakeInstance) -> None:
    while instance.batch:
        batch, instance.batch = instance.batch, ()
        scheduler.instance_ready(instance)
        for call in batch:
            call.respond(InferResponse("m", 1))


def requests(live: int, waiting: bool) -> Callable[[int], int]:
    """Returns a function that runs a number of steps and returns the number of requests sent.

    `live` sequences are alive. With `waiting`, all but 64 of them wait for a sequence slot. Must be
    called in an event loop.
    """
    config = pb.ModelConfig(name="m", max_batch_size=64)
    config.sequence_batching.oldest.max_candidate_sequences = 64 if waiting else live
    config.sequence_batching.max_sequence_idle_microseconds = 3_600_000_000
    scheduler = sequence_scheduler(config, lambda first, other: True)
    instance = _FakeInstance()
    scheduler.instance_ready(instance)
    for number in range(1, live + 1):
        _send(scheduler, number, START)
    _serve(scheduler, instance)
    done = 0

    def steps(count: int) -> int:
        nonlocal done
        for index in range(done, done + count):
            if waiting:  # one sequence ends, one of the backlog gets its slot, and a new one starts
                _send(scheduler, index + 1, END)
                _send(scheduler, live + index + 1, START)
            else:
                _send(scheduler, index * 7919 % live + 1, 0)
            _serve(scheduler, instance)
        done += count
        return count * (2 if waiting else 1)

    return steps


async def measure(live: int, waiting: bool) -> float:
    """Microseconds per request."""
    steps = requests(live, waiting)
    begun = time.perf_counter()
    count = steps(_TIMED)
    return (time.perf_counter() - begun) / count * 1e6


async def _counted(live: int, waiting: bool) -> None:
    gc.disable()  # a garbage collection would be counted for the few requests during it
    steps = requests(live, waiting)
    steps(_COUNTED)
    print("ready", flush=True)
    sys.stdin.readline()
    steps(_COUNTED)
    os._exit(0)  # do not count the shutdown


def instructions(live: int, waiting: bool) -> float:
    """Instructions per request, measured over some hundred requests after the start."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out",
                "--instr-atstart=no", sys.executable, "-m", "benchmarks.sequences",
                "--count", str(live), str(int(waiting)),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"}, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            if process.stdout.readline() == "ready\n":
                count = ["callgrind_control", "--instr=on", str(process.pid)]
                subprocess.run(count, check=True, capture_output=True, timeout=60)
            _, errors = process.communicate("go\n")
    found = re.search(r"Collected : (\d+)", errors)
    assert found is not None, errors
    return int(found[1]) / _COUNTED / (2 if waiting else 1)


def main() -> None:
    if sys.argv[1:2] == ["--count"]:
        asyncio.run(_counted(int(sys.argv[2]), sys.argv[3] == "1"))
    counted = sys.argv[1:] == ["--instructions"]
    unit = "instructions" if counted else "µs"
    headings = (f"{unit}/request, all have slots", "all but 64 wait for one")
    print(table_row(("live sequences", *headings, "logarithm of their number, to that of 100")))
    print("|---|---|---|---|")
    for live in LIVE:
        figures = [
            instructions(live, waiting) if counted else asyncio.run(measure(live, waiting))
            for waiting in (False, True)
        ]
        growth = math.log(live) / math.log(LIVE[0])
        print(
            table_row([f"{live:,}", *(f"{one:,.0f}" for one in figures), f"{growth:.1f}"]),
            flush=True,
        )


if __name__ == "__main__":
    main()

"""What a request of a sequence costs the scheduler, with ever more sequences alive.

    python -m benchmarks.sequences

Lanes that answer at once stand in for instances, so that nothing but the scheduler is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from host.config.schema import pb
from host.inference import Call, InferRequest, InferResponse
from host.scheduling.sequences.call import END, START, SequenceCall
from host.scheduling.sequences.making import sequence_scheduler
from host.scheduling.sequences.scheduler import SequenceScheduler

_REQUESTS = 20_000


class _Lane:
    waiting_for: Sequence[Call] = ()
    may_wait_for: Sequence[Sequence[Call]] = ()

    def __init__(self) -> None:
        self.batch: Sequence[Call] = ()

    def run(self, calls: Sequence[Call]) -> None:
        self.batch = calls

    def cancel(self, call: Call) -> None:
        pass


def _send(scheduler: SequenceScheduler, number: int, flags: int) -> None:
    call = SequenceCall(InferRequest("m", [], correlation_id=number, flags=flags))
    call.queued_ns = call.received_ns
    scheduler.submit(call)


def _serve(scheduler: SequenceScheduler, lane: _Lane) -> None:
    while lane.batch:
        batch, lane.batch = lane.batch, ()
        scheduler.lane_free(lane)
        for call in batch:
            call.respond(InferResponse("m", 1))


async def measure(live: int, waiting: bool) -> float:
    """Microseconds per request with so many sequences alive; `waiting`: all but 64 have no slot."""
    config = pb.ModelConfig(name="m", max_batch_size=64)
    config.sequence_batching.oldest.max_candidate_sequences = 64 if waiting else live
    config.sequence_batching.max_sequence_idle_microseconds = 3_600_000_000
    scheduler = sequence_scheduler(config, lambda first, other: True)
    lane = _Lane()
    scheduler.lane_free(lane)
    for number in range(1, live + 1):
        _send(scheduler, number, START)
    _serve(scheduler, lane)
    begun = time.perf_counter()
    for index in range(_REQUESTS):
        if waiting:  # one ends, the next one of the backlog moves in, and a new one comes
            _send(scheduler, index + 1, END)
            _send(scheduler, live + index + 1, START)
        else:
            _send(scheduler, index * 7919 % live + 1, 0)
        _serve(scheduler, lane)
    count = _REQUESTS * (2 if waiting else 1)
    return (time.perf_counter() - begun) / count * 1e6


def main() -> None:
    print("| live sequences | µs/request, all have slots | all but 64 wait for one |")
    print("|---|---|---|")
    for live in (100, 1_000, 10_000, 100_000):
        slots = asyncio.run(measure(live, False))
        backlog = asyncio.run(measure(live, True))
        print(f"| {live:,} | {slots:.1f} | {backlog:.1f} |", flush=True)


if __name__ == "__main__":
    main()

"""Measures requests of a model to another model (BLS), without a client's share in the time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpcclient

from benchmarks.rows import IMAGE
from benchmarks.servers import RunningServer


@dataclass(frozen=True)
class BlsLoad:
    """`workers` threads or coroutines call at the same time; 0 is the main thread in `execute`.

    With `streamed`, each call is decoupled and gets that many responses.
    """

    model: str
    workers: int
    calls: int
    elements: int = 16
    streamed: int = 0

    @property
    def responses(self) -> int:
        """The number of responses of all calls."""
        return max(1, self.workers) * self.calls * max(1, self.streamed)


@dataclass(frozen=True)
class BlsMeasurement:
    """Responses per second, and microseconds of CPU time per response."""

    rate: float
    host_cpu: float
    all_cpu: float


THREADS, COROUTINES = "bls_threads", "bls_coroutines"

BLS_LOADS = {
    "`exec` in `execute`": BlsLoad(THREADS, 0, 1000),
    "`exec` in one thread": BlsLoad(THREADS, 1, 1000),
    "`exec` in 16 threads": BlsLoad(THREADS, 16, 200),
    "`async_exec`, one at a time": BlsLoad(COROUTINES, 1, 1000),
    "`async_exec`, 16 at a time": BlsLoad(COROUTINES, 16, 200),
    "`async_exec`, 64 at a time": BlsLoad(COROUTINES, 64, 50),
    "`async_exec` of 602 kB, 16 at a time": BlsLoad(COROUTINES, 16, 50, IMAGE),
    "`exec(decoupled=True)` in `execute`": BlsLoad(THREADS, 0, 1, 16, 10_000),
    "`async_exec(decoupled=True)`, one iterator": BlsLoad(COROUTINES, 1, 1, 16, 10_000),
}
"""Loads by the name of their row in the table."""


def measure_bls(server: RunningServer, load: BlsLoad) -> BlsMeasurement:
    """Lets the model make its calls, and reads the CPU time that the server used meanwhile."""
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        _run(client, load, max(1, load.calls // 20))  # what is done once is not measured
        before = server.cpu_seconds()
        seconds = _run(client, load, load.calls)
        after = server.cpu_seconds()
    host, everything = (
        (late - early) / load.responses * 1e6 for early, late in zip(before, after, strict=True)
    )
    return BlsMeasurement(load.responses / seconds, host, everything)


def _run(client: grpcclient.InferenceServerClient, load: BlsLoad, calls: int) -> float:
    plan = grpcclient.InferInput("PLAN", [4], "INT32")
    numbers = [load.workers, calls, load.elements, load.streamed]
    plan.set_data_from_numpy(np.array(numbers, dtype=np.int32))
    result = client.infer(load.model, [plan], client_timeout=120)
    seconds = result.as_numpy("SECONDS")
    assert seconds is not None
    return float(seconds[0])


def median(measurements: Sequence[BlsMeasurement]) -> BlsMeasurement:
    """The medians of the rates and of the CPU times."""
    return BlsMeasurement(
        *(
            statistics.median(getattr(each, what) for each in measurements)
            for what in ("rate", "host_cpu", "all_cpu")
        )
    )

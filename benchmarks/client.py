"""Compares `pbhost.Client` with the official Python client: `python -m benchmarks.client`.

Both send the same requests to one server in turns. The official client sends each tensor in the
message, as its `infer` does without more calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tritonclient.grpc as grpcclient

import pbhost
from benchmarks.servers import ours

ROUNDS = 5
SECONDS = 2.0
MODEL = "identity_fp32"
LOADS = [(16, 1), (16, 16), (1 << 20, 1), (1 << 20, 4)]
"""Elements of the tensor, and concurrent requests."""


class Measured(NamedTuple):
    """Requests per second, and microseconds of CPU time that the client takes for each."""

    rate: float
    cpu: float


def measure(send: Callable[[], object], concurrency: int, seconds: float = SECONDS) -> Measured:
    """Repeats a request, also concurrently."""
    send()
    send()
    cpu = time.process_time()
    end = time.perf_counter() + seconds

    def repeat(_: int) -> int:
        count = 0
        while time.perf_counter() < end:
            send()
            count += 1
        return count

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        count = sum(pool.map(repeat, range(concurrency)))
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Measured(count / took, 1e6 * cpu / count)


def compare(port: int, elements: int, concurrency: int, rounds: int) -> tuple[Measured, Measured]:
    """The medians of both clients, ours first."""
    url = f"127.0.0.1:{port}"
    array = np.zeros(elements, dtype=np.float32)
    with pbhost.Client(url) as client, grpcclient.InferenceServerClient(url) as official:

        def send_ours() -> object:
            return client.infer(MODEL, INPUT0=array)["OUTPUT0"]

        def send_theirs() -> object:
            given = grpcclient.InferInput("INPUT0", list(array.shape), "FP32")
            given.set_data_from_numpy(array)
            return official.infer(MODEL, [given]).as_numpy("OUTPUT0")

        mine, theirs = [], []
        for turn in range(rounds):
            if turn % 2:  # neither is always the first one
                theirs.append(measure(send_theirs, concurrency))
            mine.append(measure(send_ours, concurrency))
            if not turn % 2:
                theirs.append(measure(send_theirs, concurrency))
    return _median(mine), _median(theirs)


def _median(measured: Sequence[Measured]) -> Measured:
    return Measured(*(statistics.median(column) for column in zip(*measured, strict=True)))


def main() -> None:
    """Prints one line for each load."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    repository = Path(__file__).with_name("repository")
    flags = ["--model-control-mode=explicit", f"--load-model={MODEL}"]
    with ours(repository, flags=flags) as server:
        for elements, concurrency in LOADS:
            mine, theirs = compare(server.grpc_port, elements, concurrency, rounds)
            print(
                f"FP32[{elements}], concurrency {concurrency}: pbhost.Client {mine.rate:.0f},"
                f" tritonclient {theirs.rate:.0f} requests/s, {mine.rate / theirs.rate:.2f}x;"
                f" CPU {mine.cpu:.0f}, {theirs.cpu:.0f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()

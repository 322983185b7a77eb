"""Measures what the end of a replica on Ray costs its clients, on this machine.

    [PBHOST_TEST_RAY_PROXY=haproxy] .venv-ray/bin/python -m benchmarks.ray_drain [--rounds 5]

Four clients send small requests over gRPC one after the other, while the number of replicas goes
from one to two and back. For the way back it prints how long the replica lived, from the change
of the number to the end of its process, how many requests failed, and the longest time of a
request; and the same while a replica answers a request of five seconds. It needs root, as the
tests of Ray do.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient

from tests.conftest import wait_until
from tests.ray.conftest import GRPC, HAPROXY, Replicas, ray_cluster
from tests.ray.test_replicas import config, scale

CLIENTS = 4
LONG_SECONDS = 5


class TimedLoad:
    """Clients that send small requests one after the other, and note how long each took."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float]] = []  # when, and the seconds it took
        self.failures: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(CLIENTS)]

    def _send(self) -> None:
        given = grpcclient.InferInput("INPUT0", [4], "FP32")
        given.set_data_from_numpy(np.zeros(4, dtype=np.float32))
        with grpcclient.InferenceServerClient(GRPC) as client:
            while not self._over.is_set():
                began = time.monotonic()
                try:
                    client.infer("identity", [given])
                except grpcclient.InferenceServerException as error:
                    self.failures.append(str(error))
                now = time.monotonic()
                self.ended.append((now, now - began))

    def __enter__(self) -> TimedLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def longest(self, start: float, end: float) -> float:
        """Seconds of the longest request that ended in between."""
        return max(seconds for when, seconds in self.ended if start <= when <= end)


@contextmanager
def long_requests(count: int) -> Iterator[list[Any]]:
    """So many requests at once that take LONG_SECONDS; yields their errors as they end."""
    text = f"import time\ntime.sleep({LONG_SECONDS})\nreturn 1"
    given = grpcclient.InferInput("COMMAND", [1], "BYTES")
    given.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    errors: list[Any] = []
    with grpcclient.InferenceServerClient(GRPC) as client:
        for _ in range(count):
            client.async_infer("script", [given], lambda result, error: errors.append(error))
        yield errors
        wait_until(lambda: len(errors) == count, "the long requests to end")


def end_a_replica(replicas: Replicas, load: TimedLoad) -> tuple[float, float]:
    """Seconds until one of two replicas has ended, and of the longest request meanwhile."""
    before = set(replicas.process_ids())
    began = time.monotonic()
    replicas.update(config(num_replicas=1))
    wait_until(lambda: not all(map(psutil.pid_exists, before)), "the end of a replica")
    ended = time.monotonic()
    return ended - began, load.longest(began, ended)


def main() -> None:
    """Prints a line without long requests and one with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with ray_cluster() as cluster, cluster.deploy_config(config(num_replicas=1)) as replicas:
        for long in (0, 2):
            results: list[tuple[float, float, float]] = []
            failures: list[str] = []
            for _ in range(rounds):
                scale(replicas, 2)
                with TimedLoad() as load, long_requests(long) as errors:
                    time.sleep(1.0)  # long requests reach the replicas, and connections are made
                    began = time.monotonic()
                    time.sleep(1.0)
                    calm = load.longest(began, time.monotonic())
                    results.append((*end_a_replica(replicas, load), calm))
                failures += load.failures + [str(error) for error in errors if error]
            lives = [one[0] for one in results]
            longest, usual = (max(one[at] for one in results) * 1000 for at in (1, 2))
            print(
                f"{'HAProxy' if HAPROXY else 'proxy'}, {long} requests of {LONG_SECONDS} s: ended"
                f" after {statistics.median(lives):.1f} s ({min(lives):.1f} to {max(lives):.1f}),"
                f" longest request {longest:.0f} ms, in the second before {usual:.0f} ms,"
                f" {len(failures)} failed {failures[:2]}",
                flush=True,
            )


if __name__ == "__main__":
    main()

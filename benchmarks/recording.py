"""Measures what a recording costs the server.

    python -m benchmarks.recording [--pairs 40] [--requests 300] [--bytes 1024]

Sends requests one after the other, in bursts: alternately without a recording, while everything is
recorded, and while nothing of what is sent is chosen. Prints the CPU time of the host per request,
and what a recording at 1 % adds by these figures. Differences are too small to be seen in rates.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
import tritonclient.grpc as client

from tests.conftest import RepositoryBuilder, RunningHost

_NEVER = 1e-12  # a share of the requests


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--bytes", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = RepositoryBuilder(Path(folder))
        repository.copy("identity")
        host = RunningHost(
            f"--model-repository={folder}", "--http-address=127.0.0.1", "--http-port=0",
            "--grpc-address=127.0.0.1", "--grpc-port=0", "--metrics-port=0",
            "--allow-recording=true", "--busy-poll=false",
        )  # fmt: skip
        try:
            _measure(host.wait_started(), arguments.pairs, arguments.requests, arguments.bytes)
        finally:
            host.stop()


def _measure(host: RunningHost, pairs: int, requests: int, size: int) -> None:
    costs: dict[str, list[float]] = {"off": [], "none": [], "all": []}
    with client.InferenceServerClient(host.url) as server:
        tensor = client.InferInput("INPUT0", [size // 4], "FP32")
        tensor.set_data_from_numpy(np.zeros(size // 4, np.float32))

        def burst() -> float:
            before = _cpu_microseconds(host.process.pid)
            for _ in range(requests):
                server.infer("identity", [tensor])
            return (_cpu_microseconds(host.process.pid) - before) / requests

        burst()
        for _ in range(pairs):
            costs["off"].append(burst())
            with _recording(host, _NEVER):
                costs["none"].append(burst())
            with _recording(host, 1.0):
                costs["all"].append(burst())
    off, none, everything = (statistics.median(costs[name]) for name in ("off", "none", "all"))
    added = (0.99 * none + 0.01 * everything) / off - 1
    print(f"CPU time of the host per request of {size} bytes, median of {pairs} bursts:")
    print(f"  no recording         {off:.1f} us")
    print(f"  nothing is chosen    {none:.1f} us")
    print(f"  all are recorded     {everything:.1f} us")
    print(f"  1 % is recorded     {100 * added:+.2f} %")


@contextmanager
def _recording(host: RunningHost, sample: float) -> Iterator[None]:
    """Records a share of the requests; what arrives is read and dropped."""
    connection = HTTPConnection(host.http_url)
    settings = {"sample": sample, "seconds": 3600, "max_requests": 1_000_000}
    connection.request("POST", "/v2/models/identity/record", json.dumps(settings))
    answer = connection.getresponse()
    answer.readline()

    def read() -> None:
        with suppress(OSError, HTTPException):  # at the end
            while answer.read1(1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        connection.sock.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()


def _cpu_microseconds(pid: int) -> float:
    """CPU time of all threads of a process so far, which the kernel counts in nanoseconds."""
    counts = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in counts) / 1000


if __name__ == "__main__":
    main()

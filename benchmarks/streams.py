"""Measures streams of a decoupled model with the official Python client."""

from __future__ import annotations

import queue
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient

from benchmarks.servers import RunningServer

SECONDS = 120.0  # timeout of a response


@dataclass(frozen=True)
class Streamed:
    """Responses per second, milliseconds to the first response, and the host's memory in MB.

    `p99` is the 99th percentile of the microseconds between two responses.
    """

    rate: float
    first: float
    p99: float = 0.0
    memory_before: float = 0.0
    memory_after: float = 0.0


class _Reader:
    def __init__(self, server: RunningServer) -> None:
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send_request(self, count: int) -> None:
        given = grpcclient.InferInput("COUNT", [1], "INT32")
        given.set_data_from_numpy(np.array([count], dtype=np.int32))
        self._client.async_stream_infer("repeat", [given], enable_empty_final_response=True)

    def next_is_last(self) -> bool:
        result, error = self._answers.get(timeout=SECONDS)
        if error is not None:
            raise error
        return bool(result.get_response().parameters["triton_final_response"].bool_param)

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def one_stream(server: RunningServer, count: int) -> Streamed:
    """Sends one request that gets `count` responses."""
    reader = _Reader(server)
    try:
        reader.send_request(1)
        while not reader.next_is_last():
            pass
        started = time.perf_counter()
        reader.send_request(count)
        reader.next_is_last()
        arrivals = [time.perf_counter()]
        while not reader.next_is_last():
            arrivals.append(time.perf_counter())
        seconds = time.perf_counter() - started
    finally:
        reader.close()
    if len(arrivals) != count:
        raise SystemExit(f"{len(arrivals)} of {count} responses arrived")
    gaps = [after - before for before, after in pairwise(arrivals)]
    p99 = statistics.quantiles(gaps, n=100, method="inclusive")[98]
    return Streamed(count / seconds, (arrivals[0] - started) * 1e3, p99 * 1e6)


def many_streams(server: RunningServer, requests: int, responses: int) -> Streamed:
    """Sends `requests` requests at once, twice. The memory is measured after each time."""
    process = psutil.Process(server.pid)
    memory = []
    seconds = 0.0
    for _ in range(2):
        reader = _Reader(server)
        try:
            started = time.perf_counter()
            for _ in range(requests):
                reader.send_request(responses)
            open_requests, received = requests, 0
            while open_requests:
                last = reader.next_is_last()
                open_requests -= last
                received += not last
            seconds = time.perf_counter() - started
        finally:
            reader.close()
        if received != requests * responses:
            raise SystemExit(f"{received} of {requests * responses} responses arrived")
        memory.append(process.memory_info().rss / 1e6)
    return Streamed(requests * responses / seconds, 0.0, 0.0, *memory)

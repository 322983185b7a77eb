"""Requests of which no two are alike, as real clients send them, and the CPU time they take.

    python -m benchmarks.differing ADDRESS LOAD REQUESTS

sends that many requests of a load to a server and prints seconds and latencies as JSON.
"""

from __future__ import annotations

import atexit
import json
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from benchmarks.servers import RunningServer
from tests.triton_tools.languages import LANGUAGES

TIMEOUT = 60.0  # seconds
_WARM_UP = 400  # requests
_MOST_ELEMENTS = 256
_NODE_CLIENT = str(Path(__file__).with_name("differing_node.mjs"))  # after `make node-client`
_GO_CLIENT = Path(__file__).with_name("differing.go")

ID, DEADLINE, TRACE, SHAPE, PARAMETERS, PROXY = (
    *("id", "deadline", "trace", "shape"),
    *("parameters", "proxy"),
)
ALL = (ID, DEADLINE, TRACE, SHAPE)


@dataclass(frozen=True)
class DifferingLoad:
    """Requests to a model that differ in `parts`; without any, all of them are equal.

    `parts`: the id, the deadline (over gRPC only), the header field `traceparent`, the shape,
    parameters, or the header fields that a proxy adds. `door`: `grpc`, `stream` (one for each
    thread), `http` with binary tensors, `json`, or `node` and `go`: gRPC by their clients. The
    loop is closed: each of `threads` clients sends its next request after a response. With a
    `rate`, it is open: requests are due at fixed times, that many per second, and a latency counts
    from the time when the request was due.
    """

    parts: Sequence[str] = ()
    model: str = "identity_fp32"
    door: str = "grpc"
    threads: int = 8
    rate: int = 0


DIFFERING_LOADS = {
    "equal requests": DifferingLoad(),
    "another id": DifferingLoad([ID]),
    "another deadline (`client_timeout`)": DifferingLoad([DEADLINE]),
    "another `traceparent`": DifferingLoad([TRACE]),
    "another shape": DifferingLoad([SHAPE]),
    "all of these": DifferingLoad(ALL),
    "all of these, parameters, header fields of a proxy": DifferingLoad((*ALL, PARAMETERS, PROXY)),
    "all of these, 500/s in an open loop": DifferingLoad(ALL, rate=500),
    "all of these, on streams": DifferingLoad(ALL, door="stream"),
    "all of these, over HTTP": DifferingLoad(ALL, door="http"),
    "all of these, over HTTP as JSON": DifferingLoad(ALL, door="json"),
    "all of these, to a model with BLS": DifferingLoad(ALL, "bls_identity"),
    "all of these, to an ensemble of three": DifferingLoad(ALL, "ensemble_identity"),
    "all of these, by Node's gRPC client": DifferingLoad(ALL, door="node"),
    "all of these, by Go's gRPC client": DifferingLoad(ALL, door="go"),
}
"""Loads by the name of their row in the table."""


@dataclass(frozen=True)
class DifferingMeasurement:
    """Microseconds of CPU time per request, requests per second, and latencies in microseconds."""

    host_cpu: float
    stubs_cpu: float
    rate: float
    p50: float
    p99: float


def measure_differing(
    server: RunningServer, name: str, requests: int, warm_up: int = _WARM_UP
) -> DifferingMeasurement:
    """Sends requests from a process of their own. Raises SystemExit if one of them fails."""
    load = DIFFERING_LOADS[name]
    port = server.http_port if load.door in ("http", "json") else server.grpc_port
    if warm_up:
        _send(f"127.0.0.1:{port}", name, warm_up)
    host, everything = server.cpu_seconds()
    sent = _send(f"127.0.0.1:{port}", name, requests)
    host_after, everything_after = server.cpu_seconds()
    host_cpu = (host_after - host) / requests * 1e6
    return DifferingMeasurement(
        host_cpu, (everything_after - everything) / requests * 1e6 - host_cpu, **sent
    )


def _send(address: str, name: str, requests: int) -> Any:
    load = DIFFERING_LOADS[name]
    command = [sys.executable, "-m", "benchmarks.differing", address, name, str(requests)]
    if load.door in ("node", "go"):
        client = ["node", _NODE_CLIENT] if load.door == "node" else _go_client()
        command = [*client, address, load.model, str(load.threads), str(requests)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout)


@cache
def _go_client() -> list[str]:
    go = LANGUAGES["Go"]
    if not go.is_installed():
        raise SystemExit(f"apt-get install {go.packages}")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return go.command(_GO_CLIENT, folder)


@dataclass
class _Request:
    """What a request is made of. `options` are arguments of `infer`."""

    array: np.ndarray[Any, np.dtype[np.float32]]
    request_id: str
    timeout: float | None
    headers: dict[str, str]
    parameters: dict[str, str | int | bool]


def _requests(load: DifferingLoad, seed: int) -> Iterator[_Request]:
    numbers, arrays = random.Random(seed), np.random.default_rng(seed)
    parts = load.parts
    equal = np.zeros(16, np.float32)

    def hexadecimal(bits: int) -> str:
        return f"{numbers.getrandbits(bits):0{bits // 4}x}"

    while True:
        request = _Request(equal, "", None, {}, {})
        if parts:
            elements = numbers.randint(1, _MOST_ELEMENTS) if SHAPE in parts else 16
            request.array = arrays.random(elements, dtype=np.float32)
        if ID in parts:
            request.request_id = hexadecimal(128)
        if DEADLINE in parts:
            request.timeout = TIMEOUT + numbers.random()
        if TRACE in parts:
            request.headers["traceparent"] = f"00-{hexadecimal(128)}-{hexadecimal(64)}-01"
        if PROXY in parts:
            client = f"10.{numbers.randrange(256)}.{numbers.randrange(256)}.7"
            request.headers |= {"x-forwarded-for": client, "x-request-id": hexadecimal(128)}
        if PARAMETERS in parts:
            request.parameters = {"user": hexadecimal(32), "attempt": numbers.randrange(1000)}
        yield request


def _grpc_sender(address: str, load: DifferingLoad) -> Callable[[_Request], None]:
    client = grpcclient.InferenceServerClient(address)

    def send(request: _Request) -> None:
        given = grpcclient.InferInput("INPUT0", request.array.shape, "FP32")
        given.set_data_from_numpy(request.array)
        result = client.infer(
            load.model,
            [given],
            request_id=request.request_id,
            client_timeout=request.timeout,
            headers=request.headers,
            parameters=request.parameters or None,
        )
        _check(result.as_numpy("OUTPUT0"), request)

    return send


def _stream_sender(address: str, load: DifferingLoad) -> Callable[[_Request], None]:
    """The header of a stream is sent once: only what is inside of the requests differs."""
    client = grpcclient.InferenceServerClient(address)
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))

    def send(request: _Request) -> None:
        given = grpcclient.InferInput("INPUT0", request.array.shape, "FP32")
        given.set_data_from_numpy(request.array)
        client.async_stream_infer(
            load.model,
            [given],
            request_id=request.request_id,
            parameters=request.parameters or None,
        )
        result, error = answers.get(timeout=TIMEOUT)
        if error is not None:
            raise error
        _check(result.as_numpy("OUTPUT0"), request)

    return send


def _http_sender(address: str, load: DifferingLoad) -> Callable[[_Request], None]:
    client = httpclient.InferenceServerClient(address, network_timeout=TIMEOUT)
    binary = load.door == "http"
    wanted = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary)]

    def send(request: _Request) -> None:
        given = httpclient.InferInput("INPUT0", request.array.shape, "FP32")
        given.set_data_from_numpy(request.array, binary_data=binary)
        result = client.infer(
            load.model,
            [given],
            outputs=wanted,
            request_id=request.request_id,
            headers=request.headers,
            parameters=request.parameters or None,
        )
        _check(result.as_numpy("OUTPUT0"), request)

    return send


_SENDERS: dict[str, Callable[[str, DifferingLoad], Callable[[_Request], None]]] = {
    "grpc": _grpc_sender,
    "stream": _stream_sender,
    "http": _http_sender,
    "json": _http_sender,
}


def _check(answer: Any, request: _Request) -> None:
    if not np.array_equal(answer, request.array):
        raise SystemExit(f"wrong response to {request}: {answer}")


def _work(
    address: str, load: DifferingLoad, number: int, requests: int, start: threading.Barrier
) -> list[float]:
    """Sends the requests of one client; returns their latencies in seconds."""
    send = _SENDERS[load.door](address, load)
    made = _requests(load, number)
    send(next(made))  # connects
    latencies, pause = [], threading.Event()
    start.wait(TIMEOUT)
    begin = time.perf_counter() + number / load.rate if load.rate else 0.0
    for turn in range(requests):
        request = next(made)
        due = begin + turn * load.threads / load.rate if load.rate else time.perf_counter()
        pause.wait(max(0.0, due - time.perf_counter()))
        send(request)
        latencies.append(time.perf_counter() - due)
    return latencies


def main() -> None:
    """Sends the requests, and prints a measurement without CPU times."""
    address, name, count = sys.argv[1:]
    load = DIFFERING_LOADS[name]
    start = threading.Barrier(load.threads + 1)
    latencies: list[float] = []
    complete: list[int] = []

    def work(number: int) -> None:
        found = _work(address, load, number, int(count) // load.threads, start)
        latencies.extend(found)
        complete.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(load.threads)]
    for thread in threads:
        thread.start()
    start.wait(TIMEOUT)
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if len(complete) < load.threads:
        raise SystemExit("a client has failed")
    percentiles = statistics.quantiles([one * 1e6 for one in latencies], n=100, method="inclusive")
    rate = len(latencies) / seconds
    print(json.dumps({"rate": rate, "p50": percentiles[49], "p99": percentiles[98]}))


if __name__ == "__main__":
    main()

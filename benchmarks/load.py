"""Loads one server, and measures the CPU time that its processes use meanwhile."""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as grpcclient

from benchmarks.encoders import Model, v2_grpc, v2_json
from benchmarks.h2load import LoadResult
from benchmarks.peer import Peer
from benchmarks.servers import RunningServer


@dataclass(frozen=True)
class Load:
    """One load: a model, the number of input elements, and the concurrency.

    The input is FP32, or BYTES if `string_length` is not 0. With `shared_memory`, all tensors
    are in the client's system shared memory. With `http`, requests are sent over HTTP instead of
    gRPC. With `streaming`, all requests are sent on one stream; with `responses`, too, and each
    request gets that many responses. The client is perf_analyzer, or h2load with `by_h2load`, which
    sends the same request again and again, on as many connections. Over HTTP, its tensors are JSON.
    """

    model: str
    elements: int
    concurrency: int
    shared_memory: bool = False
    http: bool = False
    string_length: int = 0
    streaming: bool = False
    responses: int = 0
    by_h2load: bool = False


@dataclass(frozen=True)
class Measurement:
    """Requests per second; latencies and CPU time per request in microseconds.

    For a stream, the rate is responses per second and the latency is that of the first response.
    `host_cpu` is the CPU time of the server process, `all_cpu` includes its stubs. `batch` is the
    mean number of requests per executed batch.
    """

    rate: float
    p50: float
    p99: float
    host_cpu: float
    all_cpu: float
    batch: float


@dataclass(frozen=True)
class _Counts:
    """Counters of a server: requests, executed requests, batches and CPU seconds."""

    answered: int
    inferences: int
    executions: int
    host: float
    everything: float

    @classmethod
    def of(cls, server: RunningServer, model: str) -> _Counts:
        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            (found,) = client.get_inference_statistics(model).model_stats
        return cls(
            int(found.inference_stats.success.count),
            int(found.inference_count),
            int(found.execution_count),
            *server.cpu_seconds(),
        )


def measure(peer: Peer, load: Load, server: RunningServer, seconds: float = 2.0) -> Measurement:
    """Loads the server for three windows of `seconds` each."""
    before = _Counts.of(server, load.model)
    result = (
        _by_h2load(load, server, 3 * seconds)
        if load.by_h2load
        else _by_perf_analyzer(peer, load, server, seconds)
    )
    after = _Counts.of(server, load.model)
    answered = after.answered - before.answered
    if load.by_h2load and answered < result.rate * 3 * seconds:
        # h2load sees only the HTTP status, which is 200 for failed gRPC calls, too.
        raise SystemExit(f"{load}: the server has answered {answered} requests only")
    count = max(1, answered)
    return Measurement(
        result.rate,
        result.p50,
        result.p99,
        (after.host - before.host) / count * 1e6,
        (after.everything - before.everything) / count * 1e6,
        (after.inferences - before.inferences) / max(1, after.executions - before.executions),
    )


def _by_h2load(load: Load, server: RunningServer, seconds: float) -> LoadResult:
    encode = v2_json if load.http else v2_grpc
    request = encode(server, Model(load.model, "INPUT0", "OUTPUT0", (load.elements,)))
    return request.measure(load.concurrency, seconds)


def _by_perf_analyzer(peer: Peer, load: Load, server: RunningServer, seconds: float) -> LoadResult:
    with tempfile.TemporaryDirectory() as folder:
        report, data = Path(folder, "report.csv"), Path(folder, "data.json")
        endpoint = ("http", server.http_port) if load.http else ("grpc", server.grpc_port)
        if load.responses:
            sample = {"COUNT": {"content": [load.responses], "shape": [1]}}
            data.write_text(json.dumps({"data": [sample]}))
            # Count requests: in a window of fixed time, none of these long requests may end.
            given = ["--streaming", "--input-data", str(data)]
            given += ["--measurement-mode", "count_windows", "--measurement-request-count", "10"]
        else:
            given = ["--shape", f"INPUT0:{load.elements}"]
        if load.streaming:
            given += ["--streaming"]
        if load.string_length:
            given += ["--string-length", str(load.string_length)]
        if load.shared_memory:
            given += ["--shared-memory", "system"]
            given += ["--output-shared-memory-size", str(load.elements * 4)]
        done = subprocess.run(
            [
                str(peer.perf_analyzer),
                *("-m", load.model, "-i", endpoint[0], "-u", f"127.0.0.1:{endpoint[1]}"),
                *("--concurrency-range", str(load.concurrency)),
                *given,
                # Three windows with no limit of their spread: the median of rounds removes noise.
                *("-p", f"{seconds * 1000:.0f}", "-r", "4", "-s", "100", "-f", str(report)),
            ],
            env={"LD_LIBRARY_PATH": str(peer.folder / "libs"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise SystemExit(f"perf_analyzer failed:\n{done.stdout}\n{done.stderr}")
        (row,) = csv.DictReader(report.read_text().splitlines())
    rate = "Response Throughput" if load.responses else "Inferences/Second"
    return LoadResult(float(row[rate]), float(row["p50 latency"]), float(row["p99 latency"]))

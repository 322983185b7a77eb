"""perf_analyzer against one server, and what the server's processes used meanwhile."""

from __future__ import annotations

import csv
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import tritonclient.grpc as grpcclient

from benchmarks.peer import Peer
from benchmarks.servers import RunningServer


@dataclass(frozen=True)
class Load:
    """What to ask: a model, the length of its FP32 input, and how many at a time.

    With `shared_memory`, inputs and outputs lie in the client's system shared memory; with `http`,
    they come by the other door.
    """

    model: str
    elements: int
    concurrency: int
    shared_memory: bool = False
    http: bool = False


@dataclass(frozen=True)
class Measurement:
    """Requests per second, and in microseconds: latencies, CPU time per request.

    `host_cpu` is that of the server's process alone, `all_cpu` includes its stubs.
    """

    rate: float
    p50: float
    p99: float
    host_cpu: float
    all_cpu: float


def measure(peer: Peer, load: Load, server: RunningServer) -> Measurement:
    """Load the server until perf_analyzer's figure is stable, or has been tried often enough."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        pid, port = server.pid, server.grpc_port
        door = ("http", server.http_port) if load.http else ("grpc", port)
        before = _used(pid), _answered(port, load.model)
        done = subprocess.run(
            [
                str(peer.perf_analyzer),
                *("-m", load.model, "-i", door[0], "-u", f"127.0.0.1:{door[1]}"),
                *("--shape", f"INPUT0:{load.elements}"),
                *("--concurrency-range", str(load.concurrency)),
                *(_in_shared_memory(load) if load.shared_memory else ()),
                # Three windows, whatever their spread: rounds and their median deal with noise.
                *("-p", "2000", "-r", "4", "-s", "100", "-f", str(report)),
            ],
            env={"LD_LIBRARY_PATH": str(peer.folder / "libs"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        after = _used(pid), _answered(port, load.model)
        if not report.exists():
            raise SystemExit(f"perf_analyzer failed:\n{done.stdout}\n{done.stderr}")
        (row,) = csv.DictReader(report.read_text().splitlines())
    count = max(1, after[1] - before[1])
    host, everything = (
        (late - early) / count * 1e6 for early, late in zip(before[0], after[0], strict=True)
    )
    return Measurement(
        float(row["Inferences/Second"]),
        float(row["p50 latency"]),
        float(row["p99 latency"]),
        host,
        everything,
    )


def _in_shared_memory(load: Load) -> tuple[str, ...]:
    size = str(load.elements * 4)
    return "--shared-memory", "system", "--output-shared-memory-size", size


def _used(pid: int) -> tuple[float, float]:
    """CPU seconds so far: of the process, and with its children."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    own = times.user + times.system
    children = [child.cpu_times() for child in process.children(recursive=True)]
    return own, own + sum(child.user + child.system for child in children)


def _answered(grpc_port: int, model: str) -> int:
    """Requests that the model has answered so far, by the server's own count."""
    with grpcclient.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        (statistics,) = client.get_inference_statistics(model).model_stats
    return int(statistics.inference_stats.success.count)

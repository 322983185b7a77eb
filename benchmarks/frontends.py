"""Measures frontend processes: requests/s, CPU time of each kind of process, and memory.

    python -m benchmarks.frontends [--counts 0 1 2] [--seconds 4] [--rounds 2] [--connections 2000]

The client is h2load. CPU times are microseconds per request: a busy machine changes them less than
the requests/s. What larger machines would do is computed from them (`at_most`).
"""

from __future__ import annotations

import argparse
import math
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from benchmarks.h2load import GRPC, SERVICE, grpc_frame, h2load
from benchmarks.servers import RunningServer, ours

LOADS = ((16, 1, 1), (16, 16, 1), (16, 64, 1), (150_528, 4, 1), (150_528, 16, 4))
"""Elements, concurrency, and instances."""
SOURCE = Path(__file__).parent / "repository" / "identity_fp32"
KINDS = ("server", "frontends", "stubs")
_WHEN = ("started", "after 602 kB", "idle again")
_IDLE_SECONDS = 6.0  # arenas return memory that was not needed for 2 to 4 seconds


@contextmanager
def serving(count: int, instances: int) -> Iterator[RunningServer]:
    """A server with `count` frontend processes."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "identity_fp32")
        shutil.copytree(SOURCE, model)
        config = model / "config.pbtxt"
        config.write_text(config.read_text().replace("count: 1", f"count: {instances}"))
        with ours(Path(folder), flags=(f"--frontend-processes={count}",)) as server:
            yield server


def processes(server: RunningServer) -> dict[str, list[psutil.Process]]:
    """The processes of a server, by kind."""
    own = psutil.Process(server.pid)
    found: dict[str, list[psutil.Process]] = {"server": [own], "frontends": [], "stubs": []}
    for child in own.children(recursive=True):
        title = " ".join(child.cmdline())
        kind = "frontends" if title.startswith("pbhost-frontend") else "stubs"
        found[kind].append(child)
    return found


def cpu_seconds(server: RunningServer) -> dict[str, float]:
    """The CPU time by kind of process."""
    times = dict.fromkeys(KINDS, 0.0)
    for kind, found in processes(server).items():
        for process in found:
            used = process.cpu_times()
            times[kind] += used.user + used.system
    return times


def answered(server: RunningServer) -> int:
    """The number of successful requests."""
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        (found,) = client.get_inference_statistics("identity_fp32").model_stats
        return int(found.inference_stats.success.count)


def measure(server: RunningServer, elements: int, concurrency: int, seconds: float) -> list[float]:
    """Requests/s, and microseconds of CPU time per request by kind of process."""
    message = pb.ModelInferRequest(model_name="identity_fp32")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[elements])
    message.raw_input_contents.append(bytes(4 * elements))
    url = f"http://127.0.0.1:{server.grpc_port}/{SERVICE}/ModelInfer"
    body = grpc_frame(message.SerializeToString())
    answered_before, before = answered(server), cpu_seconds(server)
    result = h2load(url, body, GRPC, concurrency, seconds)
    after = cpu_seconds(server)
    count = answered(server) - answered_before
    if count < result.rate * seconds:  # a failed call has status 200, too
        raise SystemExit(f"the server has answered {count} requests only")
    return [result.rate, *((after[kind] - before[kind]) / count * 1e6 for kind in KINDS)]


def at_most(cores: int, server: float, frontend: float, stub: float) -> tuple[float, int]:
    """The requests/s that the CPU times of a request (microseconds) allow, and the frontends.

    It is computed: clients on other machines, instances without end, no time lost between cores.
    The server is one process that uses one core; frontends and stubs share the others evenly.
    """
    of_server, of_all = 1e6 / server, cores * 1e6 / (server + frontend + stub)
    rate = min(of_server, of_all)
    return rate, math.ceil(rate * frontend / 1e6)


def megabytes(server: RunningServer) -> dict[str, float]:
    """The proportional memory by kind of process, of one process."""
    return {
        kind: statistics.mean(process.memory_full_info().pss / 1e6 for process in found)
        for kind, found in processes(server).items()
        if found
    }


def memory_of_traffic(server: RunningServer, seconds: float) -> list[dict[str, float]]:
    """The memory at once and `_IDLE_SECONDS` after requests of 602 kB, as `megabytes`."""
    measure(server, 150_528, 16, seconds)
    at_once = megabytes(server)
    time.sleep(_IDLE_SECONDS)
    return [at_once, megabytes(server)]


def idle_connections(server: RunningServer, count: int) -> float:
    """Opens connections; the memory of each in kB, in the server and its frontends together."""

    def resident() -> float:
        found = processes(server)
        return sum(process.memory_full_info().pss for kind in KINDS[:2] for process in found[kind])

    before = resident()
    with ExitStack() as stack:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", server.http_port))
            stack.callback(connection.close)
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            connection.recv(1 << 16)
        return (resident() - before) / count / 1e3


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", type=int, nargs="*", default=list(range(len(LOADS))))
    parser.add_argument("--cores", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--connections", type=int, default=2000)
    options = parser.parse_args()
    print(f"{'elements':>9} {'at once':>7} {'inst.':>5} {'N':>2} {'req/s':>8}", *KINDS)
    for elements, concurrency, instances in (LOADS[one] for one in options.loads):
        rows: dict[int, list[list[float]]] = {count: [] for count in options.counts}
        for _ in range(options.rounds):
            for count in options.counts:
                with serving(count, instances) as server:
                    rows[count].append(measure(server, elements, concurrency, options.seconds))
        for count, found in rows.items():
            rate, *used = (statistics.median(values) for values in zip(*found, strict=True))
            print(
                f"{elements:9} {concurrency:7} {instances:5} {count:2} {rate:8.0f}",
                *(f"{one:8.1f}" for one in used),
                flush=True,
            )
            for cores in options.cores:
                most, processes_needed = at_most(cores, *used)
                print(f"  computed for {cores} cores: {most:8.0f} req/s, N={processes_needed}")
    if options.connections:
        for count in options.counts:
            with serving(count, 1) as server:
                started = megabytes(server)
                memory = [started, *memory_of_traffic(server, options.seconds)]
                for when, sizes in zip(_WHEN, memory, strict=True):
                    rounded = {kind: round(size, 1) for kind, size in sizes.items()}
                    print(f"N={count}: MB per process, {when}: {rounded}", flush=True)
                each = idle_connections(server, options.connections)
                print(f"N={count}: {each:.1f} kB per idle connection", flush=True)


if __name__ == "__main__":
    main()

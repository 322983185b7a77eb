"""Measures what a request costs as a server grows: instances, models, connections.

    python -m benchmarks.curves [--only instances|models|connections] [--rounds N] [--seconds N]

The servers of one curve run side by side, and are loaded in turns. The load is always the same: one
request with FP32[16] at a time on each of 16 connections, by h2load, to one model.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks.load import Load, Measurement, measure
from benchmarks.page import Report
from benchmarks.peer import Peer
from benchmarks.servers import RunningServer, ours

MODEL = "identity_fp32"
SOURCE = Path(__file__).resolve().with_name("repository") / MODEL
ENSEMBLE = """platform: "ensemble"
input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "identity_fp32"
  model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" }
  output_map { key: "OUTPUT0" value: "OUTPUT0" }
} ] }
"""
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
ANSWER_SECONDS = 30.0  # how long a connection waits for its first answer

StartServer = Callable[[int], AbstractContextManager[RunningServer]]

HEADINGS = ("curve", "size", "requests/s", "host CPU µs/request", "with stubs")


@contextmanager
def with_instances(count: int) -> Iterator[RunningServer]:
    """Runs a server whose only model has `count` instances."""
    with _serving(instances=count, models=1) as server:
        yield server


@contextmanager
def with_models(count: int) -> Iterator[RunningServer]:
    """Runs a server with `count` models: all but one are ensembles, which need no process."""
    with _serving(instances=1, models=count) as server:
        yield server


@contextmanager
def with_connections(count: int) -> Iterator[RunningServer]:
    """Runs a server with `count` open connections that have sent one request, and are idle."""
    with _serving(instances=1, models=1) as server, ExitStack() as opened:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", server.http_port), ANSWER_SECONDS)
            opened.enter_context(connection)
            connection.sendall(LIVE)
            if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                raise SystemExit("a connection was not answered")
        yield server


CURVES: dict[str, tuple[StartServer, tuple[int, ...]]] = {
    "instances": (with_instances, (1, 4, 16, 64)),
    "models": (with_models, (1, 100, 1000)),
    "connections": (with_connections, (1, 100, 2000)),
}
"""What starts a server of a size, and the sizes, by the name of the curve."""


@contextmanager
def _serving(instances: int, models: int) -> Iterator[RunningServer]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, MODEL)
        shutil.copytree(SOURCE, model, ignore=shutil.ignore_patterns("__pycache__"))
        config = model / "config.pbtxt"
        config.write_text(config.read_text().replace("count: 1,", f"count: {instances},"))
        for number in range(1, models):
            Path(folder, f"ensemble_{number}", "1").mkdir(parents=True)
            Path(folder, f"ensemble_{number}", "config.pbtxt").write_text(ENSEMBLE)
        with ours(Path(folder)) as server:
            yield server


def measure_curve(name: str, rounds: int, seconds: float) -> list[tuple[int, Measurement]]:
    """Loads the servers of a curve in turns; returns the medians by size."""
    start, sizes = CURVES[name]
    load, no_peer = Load(MODEL, 16, 16, by_h2load=True), Peer(Path())
    with ExitStack() as running:
        servers = [running.enter_context(start(size)) for size in sizes]
        found: list[list[Measurement]] = [[] for _ in sizes]
        for _ in range(rounds):
            for server, results in zip(servers, found, strict=True):
                results.append(measure(no_peer, load, server, seconds / 3))
    return [(size, _median(results)) for size, results in zip(sizes, found, strict=True)]


def _median(results: list[Measurement]) -> Measurement:
    names = Measurement.__dataclass_fields__
    return Measurement(
        *(statistics.median(getattr(one, what) for one in results) for what in names)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CURVES, help="measure this curve only")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    arguments = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for the connections
    report = Report(keep=False)
    for name in [arguments.only] if arguments.only else CURVES:
        for size, one in measure_curve(name, arguments.rounds, arguments.seconds):
            cells = [f"{one.rate:,.0f}", f"{one.host_cpu:.0f}", f"{one.all_cpu:.0f}"]
            report.row(HEADINGS, [name, f"{size:,}", *cells])


if __name__ == "__main__":
    main()

"""Compares `pbhost bench` with perf_analyzer: `python -m benchmarks.generator --peer FOLDER`.

Both measure the same server at the same time, each its own copy of a model that sleeps, so that
neither is the limit and what disturbs the machine disturbs both. They change copies in each round.
Their figures should be the same within 5 %; the median ratio of the rounds is printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.peer import Peer
from benchmarks.servers import RunningServer, ours, theirs

MODEL = """
import time

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            time.sleep({seconds})
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        return responses
"""
STREAM = """
import time

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            for _ in range(5):
                time.sleep(0.002)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"
max_batch_size: 0
input {{ name: "X" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 16 ] }}
instance_group {{ count: {instances} kind: KIND_CPU }}
{more}
"""


@dataclass(frozen=True)
class Row:
    """A load: a model of the repository, the protocol, and the concurrency."""

    model: str
    http: bool
    concurrency: int
    streaming: bool = False


COPIES = "_a", "_b"
ROWS = [
    Row("sleep_10", False, 1),
    Row("sleep_10", True, 2),
    Row("sleep_5", False, 8),
    Row("sleep_20", True, 8),
    Row("stream_10", False, 4, streaming=True),
]


class Figures(NamedTuple):
    """Requests per second, and quantiles of the latency in milliseconds."""

    rate: float
    p50: float
    p99: float


def write_repository(folder: Path) -> None:
    """Writes the models."""
    for copy in COPIES:
        _write_models(folder, copy)


def _write_models(folder: Path, copy: str) -> None:
    for name, seconds, instances in (
        (f"sleep_10{copy}", 0.01, 2),
        (f"sleep_5{copy}", 0.005, 4),
        (f"sleep_20{copy}", 0.02, 8),
    ):
        _write(
            folder / name,
            MODEL.format(seconds=seconds),
            CONFIG.format(instances=instances, more=""),
        )
    decoupled = "model_transaction_policy { decoupled: true }"
    _write(folder / f"stream_10{copy}", STREAM, CONFIG.format(instances=4, more=decoupled))


def _write(folder: Path, code: str, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(config)


def by_bench(server: RunningServer, row: Row, seconds: float) -> Figures:
    """Measures with `pbhost bench`."""
    url = (
        f"http://127.0.0.1:{server.http_port}"
        if row.http
        else f"grpc://127.0.0.1:{server.grpc_port}"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pbhost", "bench", url, row.model, "--format=json"),
            *(f"--concurrency={row.concurrency}", f"--window={seconds}", "--windows=4"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (level,) = json.loads(done.stdout)["levels"]
    if level["client_limit"]:
        print(f"  {row}: {level['client_limit']}", flush=True)
    return Figures(level["requests_per_second"], level["latency_p50_ms"], level["latency_p99_ms"])


def by_perf_analyzer(peer: Peer, server: RunningServer, row: Row, seconds: float) -> Figures:
    """Measures with perf_analyzer."""
    protocol, port = ("http", server.http_port) if row.http else ("grpc", server.grpc_port)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        done = subprocess.run(
            [
                str(peer.perf_analyzer),
                *("-m", row.model, "-i", protocol, "-u", f"127.0.0.1:{port}"),
                *("--concurrency-range", str(row.concurrency)),
                *(["--streaming"] if row.streaming else []),
                *("-p", f"{seconds * 1000:.0f}", "-r", "4", "-s", "100", "-f", str(report)),
            ],
            env={"LD_LIBRARY_PATH": str(peer.folder / "libs"), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise SystemExit(f"perf_analyzer failed:\n{done.stdout}\n{done.stderr}")
        (line,) = csv.DictReader(report.read_text().splitlines())
    return Figures(
        float(line["Inferences/Second"]),
        float(line["p50 latency"]) / 1000,
        float(line["p99 latency"]) / 1000,
    )


def main() -> None:
    """Prints a line for each server and row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window")
    arguments = parser.parse_args()
    peer = Peer(arguments.peer)
    peer.install()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_repository(repository)
        for name, started in (("pbhost", ours(repository)), ("Triton", theirs(repository, peer))):
            with started as server:
                for row in ROWS:
                    _compare(name, peer, server, row, arguments.rounds, arguments.seconds)


def _compare(
    name: str, peer: Peer, server: RunningServer, row: Row, rounds: int, seconds: float
) -> None:
    mine, other = [], []
    for number in range(rounds):
        first, second = COPIES if number % 2 else reversed(COPIES)
        with ThreadPoolExecutor(2) as pool:
            ours_found = pool.submit(
                by_bench, server, replace(row, model=f"{row.model}{first}"), seconds
            )
            theirs_found = pool.submit(
                by_perf_analyzer, peer, server, replace(row, model=f"{row.model}{second}"), seconds
            )
            mine.append(ours_found.result())
            other.append(theirs_found.result())
    cells = []
    for field in Figures._fields:
        one = [getattr(figures, field) for figures in mine]
        two = [getattr(figures, field) for figures in other]
        ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
        cells.append(
            f"{field} {statistics.median(one):.2f} / {statistics.median(two):.2f} = {ratio:.3f}"
        )
    print(f"{name}, {row}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()

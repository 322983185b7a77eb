"""Measures a model of 500 MB whose instances share one copy of it by `preload`.

    python -m benchmarks.preload [--megabytes 500] [--instances 8]

Prints the memory of all its processes with one and with all instances, and how long the load took
that added the last instance, several times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import tritonclient.grpc as grpcclient

from benchmarks.on_demand import connect, stub_processes
from benchmarks.servers import RunningServer, ours
from host.system.resources import proportional_bytes

MODEL = """
import numpy as np


class TritonPythonModel:
    @staticmethod
    def preload(args):
        TritonPythonModel.weights = np.ones(SIZE, np.uint8)

    def initialize(self, args):
        self.last = int(self.weights[-1])

    def execute(self, requests):
        return []
"""
ROUNDS = 5


def load(client: grpcclient.InferenceServerClient, instances: int) -> float:
    """Loads the model with `instances` instances; returns the seconds."""
    config = {
        "name": "large",
        "backend": "python",
        "input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [1]}],
        "instance_group": [{"count": instances}],
    }
    begun = time.monotonic()
    client.load_model("large", config=json.dumps(config))
    return time.monotonic() - begun


def megabytes(server: RunningServer) -> float:
    """The PSS of the processes of the model, in MB."""
    return sum(map(proportional_bytes, stub_processes(server, prepared=True))) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--instances", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "large" / "1"
        directory.mkdir(parents=True)
        size = str(given.megabytes * 1_000_000)
        (directory / "model.py").write_text(MODEL.replace("SIZE", size))
        with ours(Path(folder), flags=["--model-control-mode=explicit"]) as server:
            with connect(server) as client:
                load(client, 1)
                one = megabytes(server)
                load(client, given.instances)
                every = megabytes(server)
                seconds: list[float] = []
                for _ in range(ROUNDS):
                    load(client, given.instances - 1)
                    seconds.append(load(client, given.instances))
    print(f"memory with one instance: {one:.0f} MB")
    print(f"memory with {given.instances}: {every:.0f} MB, {every / one:.2f} times as much")
    print(
        f"a load that adds the last instance: {statistics.median(seconds) * 1000:.0f} ms, median of"
        f" {ROUNDS}, at most {max(seconds) * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()

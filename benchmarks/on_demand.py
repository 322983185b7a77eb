"""Serves more models than fit into a memory budget, and measures what that costs.

    python -m benchmarks.on_demand [--minutes 10] [--models 50] [--fitting 10] [--clients 16]
        [--pairs 20]

Clients ask models of 20 MB each, chosen by a Zipf distribution; the budget is the measured memory
of those that fit. Then a loaded model is asked in turn on a host with a budget and on one without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as grpcclient

from benchmarks.servers import RunningServer, ours
from host.system.resources import proportional_bytes

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = np.ones(20_000_000, np.uint8)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        return responses
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "Y" data_type: TYPE_INT32 dims: 1 }
"""
ON_DEMAND = "--model-control-mode=on-demand"
EXPONENT = 1.1  # of the Zipf distribution
SAMPLE_SECONDS = 0.1
REQUESTS = 500  # of each side of a pair


@contextmanager
def repository(models: int) -> Iterator[Path]:
    """A repository of models `m0`, `m1` and so on."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(models):
            directory = Path(folder) / f"m{number}" / "1"
            directory.mkdir(parents=True)
            (directory / "model.py").write_text(MODEL)
            (directory.parent / "config.pbtxt").write_text(CONFIG)
        yield Path(folder)


def ask(client: grpcclient.InferenceServerClient, number: int) -> None:
    """Asks a model, and checks the response."""
    x = grpcclient.InferInput("X", [1], "INT32").set_data_from_numpy(np.array([number], np.int32))
    response = client.infer(f"m{number}", [x])
    if response.as_numpy("Y").tolist() != [number]:
        raise ValueError(f"m{number} sent {response.as_numpy('Y')}")


def connect(server: RunningServer) -> grpcclient.InferenceServerClient:
    """A client of a server."""
    return grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")


def stub_bytes(server: RunningServer) -> int | None:
    """The PSS of the processes of all models, in bytes; None if one began or ended meanwhile."""
    stubs = stub_processes(server)
    total = sum(map(proportional_bytes, stubs))
    return total if stub_processes(server) == stubs else None


def stub_processes(server: RunningServer, prepared: bool = False) -> set[int]:
    """The processes of models: those that fork servers have forked.

    `prepared`: also the fork servers that have forked any, as they have prepared a model.
    """
    children = psutil.Process(server.pid).children()
    found: set[int] = set()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            stubs = {stub.pid for stub in child.children(recursive=True)}
            found |= stubs | ({child.pid} if stubs and prepared else set())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, with the scheduler's resolution."""
    schedules = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(schedule.read_text().split()[0]) for schedule in schedules) / 1e9


def measure_models(folder: Path, count: int) -> int:
    """The bytes of all these loaded models together."""
    with ours(folder, flags=[ON_DEMAND]) as server, connect(server) as client:
        for number in range(count):
            ask(client, number)
        return stub_bytes(server) or 0


class Load:
    """Clients that ask models until `end`."""

    def __init__(self, server: RunningServer, models: int, clients: int) -> None:
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()
        self._server = server
        ranks = np.arange(1, models + 1, dtype=np.float64) ** -EXPONENT
        self._shares = ranks / ranks.sum()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_requests, args=(seed,), daemon=True)
            for seed in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _send_requests(self, seed: int) -> None:
        choose = np.random.default_rng(seed)
        with connect(self._server) as client:
            while not self._stop.is_set():
                begun = time.monotonic()
                try:
                    ask(client, int(choose.choice(len(self._shares), p=self._shares)))
                except Exception as error:  # every failure is reported at the end of the run
                    self.failures[str(error) or repr(error)] += 1
                    self._stop.wait(1)
                self.seconds.append(time.monotonic() - begun)

    def end(self) -> None:
        """Stops each client after its current request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)


def serve_many(
    folder: Path, models: int, clients: int, budget: int, minutes: float
) -> Counter[str]:
    """Loads a host, prints what happened, and returns the failures."""
    samples: list[int] = []
    with ours(folder, flags=[ON_DEMAND, f"--memory-budget={budget}"]) as server:
        load, pause = Load(server, models, clients), threading.Event()
        end = time.monotonic() + minutes * 60
        while time.monotonic() < end:
            if (sample := stub_bytes(server)) is not None:
                samples.append(sample)
            pause.wait(SAMPLE_SECONDS)
        load.end()
    times = sorted(load.seconds)
    print(f"{len(times)} requests in {minutes:g} minutes, {load.failures.total()} failed")
    for share in (0.5, 0.9, 0.99, 1.0):
        print(f"  p{share * 100:g}: {times[int(share * (len(times) - 1))] * 1000:.1f} ms")
    print(f"memory of models: {max(samples) / 1e6:.1f} MB at most, in {len(samples)} samples")
    print(f"  the budget: {budget / 1e6:.1f} MB, exceeded in {sum(s > budget for s in samples)}")
    print(f"  by at most {max(0, max(samples) - budget) / 1e6:.1f} MB")
    return load.failures


def compare(folder: Path, budget: int, pairs: int) -> None:
    """Prints how much CPU time of the host a request takes, with and without a budget."""
    polling = "--busy-poll=false"  # its time would hide that of requests
    flags = [ON_DEMAND, f"--memory-budget={budget}", polling]
    without = ["--model-control-mode=explicit", "--load-model=m0", polling]
    with ours(folder, flags=without) as plain:
        with ours(folder, flags=flags) as limited:
            clients = [connect(server) for server in (plain, limited)]
            hosts = [server.pid for server in (plain, limited)]
            ratios: list[float] = []
            for pair in range(pairs + 1):
                spent = [0.0, 0.0]
                for side in ((0, 1), (1, 0))[pair % 2]:
                    before = cpu_seconds(hosts[side])
                    for _ in range(REQUESTS):
                        ask(clients[side], 0)
                    spent[side] = cpu_seconds(hosts[side]) - before
                if pair:  # the first one warms up
                    ratios.append(spent[1] / spent[0])
            for client in clients:
                client.close()
    ratios.sort()
    middle, reach = (pairs - 1) / 2, 0.98 * pairs**0.5  # ranks of the median's 95 % interval
    low, high = ratios[max(0, int(middle - reach))], ratios[min(pairs - 1, int(middle + reach) + 1)]
    print(
        "CPU time of the host per request to a loaded model, with a budget : without:"
        f" {statistics.median(ratios):.3f} (median of {pairs} pairs of {REQUESTS} requests, its"
        f" 95 % interval {low:.3f} to {high:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--fitting", type=int, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    with repository(given.models) as folder:
        budget = measure_models(folder, given.fitting)
        print(
            f"{given.models} models, a budget of {budget / 1e6:.1f} MB for {given.fitting} of them"
        )
        failures = serve_many(folder, given.models, given.clients, budget, given.minutes)
        compare(folder, budget, given.pairs)
    if failures:
        raise SystemExit("\n".join(f"{n} x {what}" for what, n in failures.items()))


if __name__ == "__main__":
    main()

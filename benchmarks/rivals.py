"""Compares this host with MLServer and LitServe, on the same identity model and ONNX network.

h2load is the client. Each server has one computing process per model, or one for all, with one
thread of ONNX Runtime. All other settings are defaults.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.encoders import EncodedRequest, Model, RequestEncoder, plain_json, v2_grpc, v2_json
from benchmarks.h2load import LoadResult
from benchmarks.page import Report
from benchmarks.servers import RunningServer, free_port, ours, running

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "rival_servers"

IDENTITY = Model("identity_fp32", "INPUT0", "OUTPUT0", (16,))
NETWORK = Model("mlp_onnx", "X", "Y", (1, 256))
MODELS = {"identity FP32[16]": IDENTITY, "MLP in ONNX": NETWORK}


def is_answering(url: str) -> Callable[[], bool]:
    """Returns a check whether a URL answers with status 200."""

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:  # it does not listen yet, or it is busy with its start
            return False

    return is_ready


@contextmanager
def mlserver(environment: Path, network: Path) -> Iterator[RunningServer]:
    """Runs MLServer with one worker process, its default."""
    with tempfile.TemporaryDirectory() as folder:
        port, http_port = free_port(), free_port()
        settings = {"host": "127.0.0.1", "http_port": http_port, "grpc_port": port}
        settings |= {"metrics_port": free_port(), "parallel_workers": 1}
        Path(folder, "settings.json").write_text(json.dumps(settings))
        for name, kind in ((IDENTITY.name, "Identity"), (NETWORK.name, "Network")):
            home = Path(folder, name)
            home.mkdir()
            shutil.copy(SOURCES / "mlserver_models.py", home)
            parameters = {"uri": str(network)}
            kind = f"mlserver_models.{kind}"
            model = {"name": name, "implementation": kind, "parameters": parameters}
            Path(home, "model-settings.json").write_text(json.dumps(model))
        command = [str(environment / "bin" / "mlserver"), "start", folder]
        ready = is_answering(f"http://127.0.0.1:{http_port}/v2/health/ready")
        with running(command, port, http_port, ready) as server:
            yield server


@contextmanager
def litserve(environment: Path, network: Path) -> Iterator[RunningServer]:
    """Runs LitServe with one worker process per model and one HTTP process. It has no gRPC."""
    port = free_port()
    source = str(SOURCES / "litserve_server.py")
    command = [str(environment / "bin" / "python"), source, str(port), str(network)]
    with running(command, 0, port, is_answering(f"http://127.0.0.1:{port}/health")) as server:
        yield server


@dataclass(frozen=True)
class Rival:
    """Another server: how to start it, and by endpoint, the encoders for its and our requests."""

    name: str
    start: Callable[[Path, Path], AbstractContextManager[RunningServer]]
    endpoints: dict[str, tuple[RequestEncoder, RequestEncoder]]

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of its table."""
        rate, p99 = ("requests/s: ours", self.name, "ratio"), ("p99 µs: ours", self.name)
        return ("work", *rate, *p99)

    def install(self, folder: Path) -> Path:
        """Creates its environment unless it exists. Raises CalledProcessError if pip fails."""
        home = folder / self.name.lower()
        done = home / "installed"
        wanted = SOURCES / f"{self.name.lower()}.txt"
        if not done.exists() or done.read_text() != wanted.read_text():
            venv.create(home, with_pip=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "-r", str(wanted)]
            subprocess.run(pip, check=True, capture_output=True, text=True)
            done.write_text(wanted.read_text())
        return home


RIVALS = (
    Rival("MLServer", mlserver, {"HTTP JSON": (v2_json, v2_json), "gRPC": (v2_grpc, v2_grpc)}),
    Rival("LitServe", litserve, {"HTTP JSON": (plain_json, v2_json)}),
)


def rows(rival: Rival) -> dict[str, tuple[Model, str, int]]:
    """Model, endpoint and number of connections of each row of its table, by the row's name."""
    return {
        f"{endpoint} {what}, {count} connection{'s'[: count > 1]}": (model, endpoint, count)
        for endpoint in rival.endpoints
        for what, model in MODELS.items()
        for count in (1, 16)
    }


def compare_rivals(folder: Path, report: Report, only: str, rounds: int, seconds: float) -> None:
    """Measures each rival that can be installed on this Python; prints why the others cannot."""
    from benchmarks import backends  # PyTorch, which writes the network, takes seconds to import

    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch)
        network = backends.write(repository, NETWORK.name, 1)
        shutil.copytree(HERE / "repository" / IDENTITY.name, repository / IDENTITY.name)
        for rival in RIVALS:
            chosen = {name: row for name, row in rows(rival).items() if only in name}
            if not chosen:
                continue
            try:
                environment = rival.install(folder.resolve())
            except subprocess.CalledProcessError as error:
                print(f"\n{rival.name} cannot be installed here:\n{error.stderr}")
                continue
            with ours(repository) as host, rival.start(environment, network) as other:
                for name, (model, endpoint, connections) in chosen.items():
                    theirs, mine = rival.endpoints[endpoint]
                    pair = mine(host, model), theirs(other, model)
                    cells = _measured(pair, connections, rounds, 3 * seconds)
                    report.row(rival.headings, [name, *cells])


def _measured(
    pair: tuple[EncodedRequest, EncodedRequest], connections: int, rounds: int, seconds: float
) -> list[str]:
    """Measures a pair; returns the cells of medians. The servers take turns in going first."""
    # Flattened: MLServer adds a dimension to a vector.
    one, other = (request.answer().ravel() for request in pair)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    found: tuple[list[LoadResult], list[LoadResult]] = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            found[side].append(pair[side].measure(connections, seconds))
    rates, p99s = (
        [statistics.median(getattr(one, what) for one in side) for side in found]
        for what in ("rate", "p99")
    )
    ratio = f"**{rates[0] / rates[1]:.2f}x**"
    return [*(f"{rate:,.0f}" for rate in rates), ratio, *(f"{p99:,.0f}" for p99 in p99s)]

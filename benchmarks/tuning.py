"""Compares `pbhost tune` with an exhaustive search: `python -m benchmarks.tuning [--only NAME]`.

Five models of known optimum are tuned, with a limit of 8 instances and batches of 32. Then all
combinations of instances and batches are measured, and at the end the best of them and the result
of `pbhost tune` again, in turns. The result should be at least 0.9 of the best.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from host.load_generator.job import Protocol
from host.load_generator.measurement import Load
from host.load_generator.requests import Inputs, encode_chains, make_inferences, make_target
from host.load_generator.workers import Workers
from host.tuning.private_server import PrivateServer
from host.tuning.settings import Settings
from host.tuning.trial import Goal, Trial, Trials

INSTANCES, BATCHES = (1, 2, 4, 8), (1, 4, 8, 16, 32)
MODEL = """
import time

import numpy as np

import triton_python_backend_utils as pb_utils


def compute(milliseconds):
    end = time.thread_time() + milliseconds / 1000
    while time.thread_time() < end:
        pass


class TritonPythonModel:
    def execute(self, requests):
        count = len(requests)
        {work}
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy())]
            )
            for one in requests
        ]
"""
BLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            call = pb_utils.InferenceRequest(
                model_name="target", requested_output_names=["Y"], inputs=[x]
            )
            y = pb_utils.get_output_tensor_by_name(call.exec(), "Y")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y.as_numpy())]))
        return responses
"""
CONFIG = """\
{batch}
input {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }}
{more}
"""
CODES = {
    "cpu_bound": ("compute(5 * count)", ""),
    "sleep_bound": ("time.sleep(0.01 * count)", ""),
    "batch_friendly": ("time.sleep(0.01 + 0.0005 * count)", "max_batch_size: 32"),
    "batch_hostile": ("time.sleep(0.002 * count ** 1.5)", "max_batch_size: 32"),
    "bls": ("", ""),
}


def write_repository(folder: Path) -> None:
    """Writes the models, and the one that `bls` calls."""
    for name, (work, batch) in CODES.items():
        code = BLS if name == "bls" else MODEL.format(work=work)
        _write(folder / name, code, CONFIG.format(batch=batch, more=""))
    more = "instance_group { count: 3 kind: KIND_CPU }"
    code = MODEL.format(work="time.sleep(0.01 * count)")
    _write(folder / "target", code, CONFIG.format(batch="", more=more))


def _write(folder: Path, code: str, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(config)


def tune(model: Path) -> tuple[float, str]:
    """Tunes a model and writes its configuration; returns the seconds, and the output."""
    started = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pbhost", "tune", str(model), "--yes"),
            *(f"--max-instances={max(INSTANCES)}", f"--max-batch={max(BATCHES)}"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.monotonic() - started, done.stdout


def compare(model: Path) -> None:
    """Tunes a model, measures all settings, and prints a line."""
    original = (model / "config.pbtxt").read_text()
    seconds, output = tune(model)
    print(output, flush=True)
    steps = len(re.findall(r"^ +\d+ ", output, re.MULTILINE))
    with PrivateServer(model, "") as server, Workers() as workers:
        server.load()
        config = server.read_config()
        found = Settings.of(config)
        inferences = make_inferences({"max_batch_size": 0, **config}, model.name, "", Inputs())
        target = make_target(server.url, Protocol.GRPC, {})
        chains = encode_chains([inferences], server.url, Protocol.GRPC, {})
        trials = Trials(
            server, workers, Load(target, chains), config, Goal(), _ignore, lambda: True
        )
        grid = [
            Settings(instances, max(batch, found.max_batch_size and 1), batch > 1)
            for instances, batch in product(INSTANCES, BATCHES if found.max_batch_size else (1,))
        ]
        grid = [one if found.max_batch_size else Settings(one.instances) for one in grid]
        results = {one: trials.measure(one) for one in grid}
        best = max(grid, key=lambda one: _rate(results[one]))
        rounds = [(_rate(trials.measure(found)), _rate(trials.measure(best))) for _ in range(3)]
        mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(one / other for one, other in rounds)
    print(
        f"{model.name}: {steps} steps in {seconds:.0f} s: {found}: {mine:.0f} requests/s; best of"
        f" {len(grid)}: {best}: {theirs:.0f} requests/s; ratio {ratio:.2f}\n",
        flush=True,
    )
    (model / "config.pbtxt").write_text(original)


def _rate(trial: Trial | None) -> float:
    return trial.measured.rate if trial is not None else 0.0


def _ignore(settings: Settings, trial: Trial | str) -> None:
    if isinstance(trial, str):
        print(f"  {settings}: {trial}", flush=True)


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(CODES), help="this model alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder))
        for name in CODES:
            if arguments.only in (None, name):
                compare(Path(folder, name))


if __name__ == "__main__":
    main()

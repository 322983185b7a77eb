"""`pbhost tune`: finds settings of a model by measuring it on a server of its own."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from host.cli.tune import main
from host.load_generator.measurement import Plan
from host.tuning import trial
from tests.conftest import DEADLINE, RepositoryBuilder, wait_until

SLEEPY = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="sleepy", requested_output_names=["Y"], inputs=request.inputs()
            )
            y = pb_utils.get_output_tensor_by_name(call.exec(), "Y").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return responses
"""
CONFIG = """\
# of one row
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }  # variable
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


PLAN = Plan(window=0.15, windows=3, stability=10, warmup=0.05, timeout=DEADLINE)
"""Short windows, which need not be alike: the models wait, so that their rates are known."""


def command(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pbhost", "tune", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def tune(*arguments: str | Path) -> tuple[int, str, str]:
    """Returns exit status, output and errors."""
    process = command(*arguments)
    out, error = process.communicate(timeout=DEADLINE)
    return process.returncode, out, error


def tune_here(*arguments: str | Path) -> tuple[int, str, str]:
    """As `tune`, in this process."""
    out, error = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out.seek(0)
    status = ended.value.code
    assert isinstance(status, int)
    return status, out.read(), error.getvalue()


def test_a_model_that_waits_gets_instances_and_its_file_keeps_the_rest(
    repository: RepositoryBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "PLAN", PLAN)
    repository.add("sleepy", SLEEPY, CONFIG)
    repository.add("caller", CALLER, CONFIG)
    path = repository.path / "caller" / "config.pbtxt"
    flags = (repository.path / "caller", "--max-instances=2", "--shape=X:3")
    status, out, error = tune_here(*flags, "--dry-run")
    assert (status, error) == (0, ""), out
    titles, first = out.splitlines()[:2]
    assert titles.split()[:2] == ["step", "instances"]
    assert re.split(" {2,}", first.strip())[:2] == ["1", "1"]
    assert path.read_text() == CONFIG  # with one instance of `sleepy`, nothing helps
    path = repository.path / "sleepy" / "config.pbtxt"
    goal = f"--goal=p99={DEADLINE}s"
    status, out, error = tune_here(repository.path / "sleepy", *flags[1:], goal, "--yes")
    assert (status, error) == (0, ""), out
    assert "+instance_group { count: 2 }\n" in out
    assert f"written to {path}\n" in out
    assert path.read_text() == CONFIG + "instance_group { count: 2 }\n"


@pytest.mark.test_all(reason="starts the command six times")
def test_what_cannot_be_tuned_is_told_in_a_line(repository: RepositoryBuilder) -> None:
    repository.add("sleepy", SLEEPY, CONFIG)
    repository.add("broken", "raise ValueError('no such file')\n", CONFIG)
    cases: list[tuple[list[str | Path], int, str]] = [
        ([repository.path / "none"], 2, "is not a model directory"),
        ([repository.path], 1, "is a model repository, expected a model directory"),
        ([repository.path / "broken"], 1, "ValueError: no such file"),
        ([repository.path / "sleepy", "--shape=Z:1"], 2, "the model has no input 'Z'"),
        ([repository.path / "sleepy", "--recording=x", "--shape=X:1"], 2, "--shape has no effect"),
        ([repository.path / "sleepy", "--goal=p99"], 2, "expected throughput, or a latency"),
    ]
    for arguments, expected, text in cases:
        status, out, error = tune(*arguments)
        assert (status, out) == (expected, ""), error
        assert error.startswith("pbhost tune: ")
        assert text in error
        assert error.count("\n") == 1


def test_ctrl_c_ends_the_server_and_writes_nothing(
    repository: RepositoryBuilder, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    repository.add("sleepy", f"open({str(started)!r}, 'w').close()\n{SLEEPY}", CONFIG)
    process = command(repository.path / "sleepy")
    try:
        wait_until(started.exists, "the model")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 1
    assert out.endswith("\nnothing was written\n")
    assert (repository.path / "sleepy" / "config.pbtxt").read_text() == CONFIG

"""Stubs that die before their first task, or between two tasks."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from tests.clients import infer_error
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

COMPLETES = """
import os, threading

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print(f"completing in {{os.getpid()}}", flush=True)
        while not os.path.exists({go!r}):
            threading.Event().wait(0.01)
        return config

    def execute(self, requests):
        return []
"""

STOPS_ITS_HOST = """
import os, signal, threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        if not os.path.exists({stub!r}):
            self.stop_host()
            threading.Thread(target=self.die, daemon=True).start()
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def stop_host(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        while open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[0] != "T":
            pass

    def die(self):
        while not self.said():
            pass
        with open({stub!r} + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename({stub!r} + ".new", {stub!r})
        os.kill(os.getpid(), signal.SIGKILL)

    def said(self):
        told = [open(f"/proc/self/fdinfo/{{fd}}").read() for fd in self.descriptors()]
        return any("eventfd-count:" in text and int(text.split("eventfd-count:")[1].split()[0], 16)
                   for text in told)

    def descriptors(self):
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}")]
"""
WARMUP = """
backend: "python" input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_warmup [ {
  name: "s" batch_size: 1 count: 2
  inputs { key: "X" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
} ]
"""


def watched(host: RunningHost) -> int:
    """How many processes the host takes for alive: it has a descriptor of each of them."""
    count = 0
    for file in Path(f"/proc/{host.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            count += "[pidfd]" in str(file.readlink())
    return count


def test_a_stub_that_dies_while_another_one_describes_its_model_ends_the_load(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    config = 'backend: "python" instance_group [ { count: 2, kind: KIND_CPU } ]'
    repository.add("slow", COMPLETES.format(go=str(go)), config)
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        told = pool.submit(infer_error, client.load_model, "slow", client_timeout=DEADLINE)
        busy = int(host.wait_for(r"completing in (\d+)").group(1))
        (idle,) = [stub for stub in host.stubs() if stub.pid != busy]
        before = watched(host)
        idle.kill()
        wait_until(lambda: watched(host) == before - 1, "the host to know that the stub is dead")
        go.touch()
        status, text = told.result(DEADLINE)
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "is not healthy. It was ended by SIGKILL" in text


def test_a_stub_that_dies_between_two_batches_of_a_warmup_ends_the_load(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """The host learns of the end of the first batch and of the stub's in the same moment."""
    stub = tmp_path / "stub"
    repository.add("fleeting", STOPS_ITS_HOST.format(stub=str(stub)), WARMUP)
    host = serve(repository, "--model-control-mode=explicit", "--stub-start=spawn").wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        told = pool.submit(infer_error, client.load_model, "fleeting", client_timeout=DEADLINE)
        wait_until(stub.exists, "the model to have answered")
        dead = psutil.Process(int(stub.read_text()))
        wait_until(
            lambda: dead.status() == psutil.STATUS_ZOMBIE and dead.num_threads() == 1,
            "the stub to be dead",
        )
        host.process.send_signal(signal.SIGCONT)
        status, text = told.result(DEADLINE)
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "failed to run warmup sample 's': Stub process 'fleeting_0' is not healthy" in text

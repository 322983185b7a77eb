"""Processes that models start, and what becomes of them when their stub or the host ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until

MODEL = """
import multiprocessing
import signal
import subprocess
import sys
import threading
from multiprocessing.shared_memory import SharedMemory

import triton_python_backend_utils as pb_utils

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True);"
SLEEP = "import threading; threading.Event().wait()"

def sleep():
    threading.Event().wait()

def square(number):
    return number * number

class TritonPythonModel:
    def initialize(self, args):
        self.pool = multiprocessing.get_context("fork").Pool(2)
        assert self.pool.map(square, [1, 2, 3]) == [1, 4, 9]
        worker = multiprocessing.get_context("fork").Process(target=sleep)
        worker.start()
        program = subprocess.Popen(["sleep", "100000"])
        stubborn = subprocess.Popen(
            [sys.executable, "-c", STUBBORN + SLEEP], stdout=subprocess.PIPE
        )
        stubborn.stdout.readline()
        detached = subprocess.Popen(["sleep", "100000"], start_new_session=True)
        self.memory = SharedMemory(create=True, size=100)
        print("started", worker.pid, program.pid, stubborn.pid, detached.pid,
              self.memory.name, flush=True)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


class Family:
    """What the model has started: three that belong to it, one that it has let go of."""

    def __init__(self, host: RunningHost, before: str = "") -> None:
        found = host.wait_for(rf"started (?!{before or 'x'} )(\d+) (\d+) (\d+) (\d+) (\S+)")
        self.first = found.group(1)
        *self.own, self.detached = [psutil.Process(int(found.group(i))) for i in range(1, 5)]
        self.memory = Path("/dev/shm", found.group(5))
        assert self.memory.exists()

    def check_gone(self) -> None:
        """Nothing is left but what the model has let go of."""
        wait_until(lambda: not any(map(runs, self.own)), "the children of the model to end")
        wait_until(lambda: not self.memory.exists(), "its shared memory to be removed")
        assert runs(self.detached)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def detached() -> Iterator[list[psutil.Process]]:
    """Those that the test ends."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        process.kill()


def test_children_of_a_model_end_with_its_stub_and_with_the_host(
    repository: RepositoryBuilder, serve: Serve, detached: list[psutil.Process]
) -> None:
    repository.add("parent", MODEL)
    host = serve(repository).wait_started()
    first = Family(host)
    detached.append(first.detached)
    host.stubs("parent_0")[0].kill()
    first.check_gone()
    second = Family(host, before=first.first)
    detached.append(second.detached)
    host.wait_for("restarted")
    assert all(map(runs, second.own))
    host.stop()
    second.check_gone()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_children_of_a_model_do_not_outlive_a_killed_host(
    repository: RepositoryBuilder, serve: Serve, detached: list[psutil.Process], start: str
) -> None:
    repository.add("parent", MODEL)
    host = serve(repository, f"--stub-start={start}").wait_started()
    family = Family(host)
    detached.append(family.detached)
    assert host.stop(signal.SIGKILL) == -signal.SIGKILL
    family.check_gone()


def test_who_watches_over_children_may_be_killed_as_well(
    repository: RepositoryBuilder, serve: Serve, detached: list[psutil.Process]
) -> None:
    repository.add("parent", MODEL)
    host = serve(repository).wait_started()
    family = Family(host)
    detached.append(family.detached)
    (warden,) = [
        child
        for child in psutil.Process(host.process.pid).children()
        if any(os.path.basename(part) == "warden.py" for part in child.cmdline())
    ]
    stub = host.stubs("parent_0")[0]
    warden.kill()
    stub.kill()
    family.check_gone()
    detached.append(Family(host, before=family.first).detached)

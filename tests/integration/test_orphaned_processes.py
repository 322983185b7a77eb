"""Processes that models start, and their end when their stub or the host ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    """The processes that the model has started: three of its own group, and a detached one."""

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


class Parent:
    """A host whose model starts processes: each stub has a family of them."""

    def __init__(self, host: RunningHost) -> None:
        self.host = host.wait_started()
        self.families: list[Family] = []

    def family(self) -> Family:
        """Of the next stub."""
        before = self.families[-1].first if self.families else ""
        self.families.append(Family(self.host, before))
        return self.families[-1]


StartParent = Callable[..., Parent]


@pytest.fixture
def start_parent(repository: RepositoryBuilder, serve: Serve) -> Iterator[StartParent]:
    """Starts such a host with flags. What its model lets go of is ended after the test."""
    repository.add("parent", MODEL)
    parents: list[Parent] = []

    def start_parent(*flags: str) -> Parent:
        parents.append(Parent(serve(repository, *flags)))
        return parents[-1]

    yield start_parent
    for parent in parents:
        parent.host.stop()
        for started in re.findall(r"started \d+ \d+ \d+ (\d+) ", parent.host.output):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(started)).kill()


def test_children_of_a_model_are_killed_with_its_stub_and_with_the_host(
    start_parent: StartParent,
) -> None:
    parent = start_parent()
    first = parent.family()
    parent.host.stubs("parent_0")[0].kill()
    first.check_gone()
    second = parent.family()
    parent.host.wait_for("restarted")
    assert all(map(runs, second.own))
    parent.host.stop()
    second.check_gone()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_stub_leads_a_group_in_the_session_of_the_host(
    start_parent: StartParent, start: str
) -> None:
    """Linux may share the CPU time between sessions, so that host and stub would wait longer."""
    host = start_parent(f"--stub-start={start}").host
    pid = host.stubs("parent_0")[0].pid
    assert os.getpgid(pid) == pid
    assert os.getsid(pid) == os.getsid(host.process.pid)
    ignored = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert ignored is not None
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # of a terminal of that session
        assert int(ignored[1], 16) >> (number - 1) & 1


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_children_of_a_model_do_not_outlive_a_killed_host(
    start_parent: StartParent, start: str
) -> None:
    parent = start_parent(f"--stub-start={start}")
    family = parent.family()
    assert parent.host.stop(signal.SIGKILL) == -signal.SIGKILL
    family.check_gone()


def test_children_are_killed_even_if_the_reaper_was_killed(start_parent: StartParent) -> None:
    parent = start_parent()
    family = parent.family()
    host = parent.host
    (reaper,) = [
        child
        for child in psutil.Process(host.process.pid).children()
        if any(os.path.basename(part) == "process_reaper.py" for part in child.cmdline())
    ]
    stub = host.stubs("parent_0")[0]
    reaper.kill()
    stub.kill()
    family.check_gone()
    parent.family()

"""A host that is PID 1, as in a container without an init process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

NEW_PIDS = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
"""Runs a command as PID 1 of a new namespace, which ends with the command."""

ORPHANS = """
import subprocess
import triton_python_backend_utils as pb_utils

DAEMONS = "for _ in 1 2 3 4 5; do setsid sh -c 'echo orphan $$' & done"

class TritonPythonModel:
    def execute(self, requests):
        subprocess.run(["sh", "-c", DAEMONS], check=True)
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


@pytest.fixture
def init(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    """A host whose model starts five daemons for each request; it is PID 1."""
    probe = subprocess.run([*NEW_PIDS, "true"], capture_output=True, text=True, timeout=DEADLINE)
    if probe.returncode:
        pytest.skip(f"no namespace of processes can be made here: {probe.stderr.strip()}")
    repository.add("orphans", ORPHANS)
    host = serve(repository, under=NEW_PIDS)
    yield host.wait_started()
    host.process.kill()  # it ignores SIGTERM, and all processes of the namespace end with it


def init_process(host: RunningHost) -> psutil.Process:
    """PID 1 of the namespace: `stop` would signal the program that has made the namespace."""
    (process,) = psutil.Process(host.process.pid).children()
    return process


def test_pid_1_reaps_orphans_and_ends_well_on_sigterm(init: RunningHost) -> None:
    with init.client() as client:
        client.infer("orphans", [])
    wait_until(lambda: init.output.count("orphan ") == 5, "the daemons to run")
    first = init_process(init)
    status = Path(f"/proc/{first.pid}/status").read_text()
    assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE), status
    # The orphans are its children until it has waited for them.
    wait_until(lambda: len(first.children()) == 1, "the orphans to be reaped")
    (server,) = first.children()
    first.send_signal(signal.SIGTERM)
    assert init.process.wait(DEADLINE) == 0
    assert init.output.count("Signal (15) received.") == 1
    assert not server.is_running()


def test_pid_1_ends_as_the_server_does(init: RunningHost) -> None:
    (server,) = init_process(init).children()
    os.kill(server.pid, signal.SIGKILL)
    assert init.process.wait(DEADLINE) == 128 + signal.SIGKILL

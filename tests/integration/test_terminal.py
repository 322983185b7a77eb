"""What an operator sees at a terminal while models load, and that a failure is told once."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import closing

from tests.conftest import DEADLINE, RepositoryBuilder, Serve

SLOW = """
import threading


class TritonPythonModel:
    def initialize(self, args):
        for number in range(20):
            print(f"step {number}", flush=True)
            threading.Event().wait(0.05)

    def execute(self, requests):
        return []
"""
CONFIG = "backend: 'python'"
HEAD = re.compile(r"[IWE]\d{4} (\d\d:\d\d:\d\d\.\d{6})")


def read_all(descriptor: int) -> bytes:
    """What a process writes to its terminal until it ends."""
    data = b""
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # the other side is closed
            return data
        if not part:
            return data
        data += part


def run_at_terminal(repository: RepositoryBuilder, env: dict[str, str]) -> tuple[int, bytes]:
    """The exit status of a host that runs at a terminal, and what it writes there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "host", "serve", f"--model-repository={repository.path}"]
    command += [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with closing(os.fdopen(ours, "rb", closefd=True)):
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**inherited, **env}
        )
        os.close(theirs)
        data = read_all(ours)
        return process.wait(DEADLINE), data


def shown(data: bytes) -> list[str]:
    """The lines that remain on a terminal, by the two control sequences that the server uses."""
    return [line.rsplit("\r\x1b[K", 1)[-1].rstrip("\r") for line in data.decode().split("\n")]


def test_log_lines_and_the_progress_line_do_not_run_into_each_other(
    repository: RepositoryBuilder,
) -> None:
    repository.add("slow", SLOW, CONFIG)
    repository.add("broken", "import absent\n", CONFIG)
    status, data = run_at_terminal(repository, {"TERM": "xterm"})
    assert status == 1
    assert b"loaded 0/2, loading: broken, slow" in data
    steps = [line for line in shown(data) if "step" in line]
    assert steps == [f"[slow:1/slow_0] step {number}" for number in range(20)]
    for line in shown(data):
        assert "loaded " not in line or line.startswith(("I", "\x1b[31mE")), line
    times = [found[1] for line in shown(data) if (found := HEAD.search(line))]
    assert len(times) > 5 and times == sorted(times), "lines are in order"


def test_errors_are_coloured_where_the_terminal_shows_colours(
    repository: RepositoryBuilder,
) -> None:
    repository.add("broken", "import absent\n", CONFIG)
    pattern = re.compile(rb"\x1b\[31mE\d{4} .*failed to load 'broken'.*\x1b\[0m\r?\n")
    assert pattern.search(run_at_terminal(repository, {"TERM": "xterm"})[1])
    for env in ({"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}):
        assert b"\x1b[31m" not in run_at_terminal(repository, env)[1]


def test_a_failure_is_told_once(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.add("broken", "import absent\n", CONFIG)
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("error: creating server: Internal - failed to load all models")
    text = "No module named 'absent'"
    told = [line for line in host.lines if text in line]
    assert len(told) == 2 and re.search(r"E\d{4} .*failed to load 'broken' version 1", told[0])
    assert told[1].startswith("| broken | 1 ")  # the table of all models
    assert sum("At:" in line for line in host.lines) == 1

"""What an operator sees at a terminal while models load, and that a failure is told once."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

from tests.conftest import DEADLINE, RepositoryBuilder, Serve
from tests.waiting import UNTIL_SOURCE

SLOW = """
    import os


    class TritonPythonModel:
        def initialize(self, args):
            for number in range(20):
                if number % 5 == 0:
                    until(lambda: os.path.exists(f"{go}{{number}}"), "the word to continue")
                print(f"step {{number}}", flush=True)

        def execute(self, requests):
            return []
"""
"""Prints 20 lines, and waits for a file before every fifth."""
BROKEN = """
    import os

    until(lambda: os.path.exists("{go}15"), "the word to continue")
    import absent
"""
CONFIG = "backend: 'python'"
HEAD = re.compile(r"[IWE]\d{4} (\d\d:\d\d:\d\d\.\d{6})")


class Terminal:
    """A terminal at which a host runs until it has ended. A context manager, which ends it."""

    def __init__(self, repository: RepositoryBuilder, env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pbhost", "serve", f"--model-repository={repository.path}"]
        command += [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
        inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**inherited, **env}
        )
        os.close(theirs)
        self.data = b""
        """What has been read from it by now."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        os.close(self._ours)

    def _read(self) -> bytes:
        """What comes next; empty at its end."""
        assert select.select([self._ours], [], [], DEADLINE)[0], self.data.decode()
        try:
            part = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return b""
        self.data += part
        return part

    def wait_for_more(self, text: bytes) -> None:
        """Returns once the text is in what has been written since the last call."""
        before = len(self.data)
        while text not in self.data[before:]:
            assert self._read(), f"the host ended without {text!r}: {self.data.decode()}"

    def wait_closed(self) -> int:
        """Reads all the rest; the exit status of the host."""
        while self._read():
            pass
        return self._process.wait(DEADLINE)


def shown(data: bytes) -> list[str]:
    """The lines that remain on a terminal, by the two control sequences that the server uses."""
    return [line.rsplit("\r\x1b[K", 1)[-1].rstrip("\r") for line in data.decode().split("\n")]


def test_log_lines_and_the_progress_line_do_not_run_into_each_other(
    repository: RepositoryBuilder, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    for name, source in (("slow", SLOW), ("broken", BROKEN)):
        repository.add(name, UNTIL_SOURCE + dedent(source.format(go=go)), CONFIG)
    with Terminal(repository, {"TERM": "xterm"}) as terminal:
        for number in range(0, 20, 5):
            terminal.wait_for_more(b"loaded 0/2, loading: broken, slow")
            Path(f"{go}{number}").touch()
        assert terminal.wait_closed() == 1
    data = terminal.data
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
    with ExitStack() as opened:
        colours, *without = [
            opened.enter_context(Terminal(repository, env))
            for env in ({"TERM": "xterm"}, {"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"})
        ]
        assert [each.wait_closed() for each in (colours, *without)] == [1] * 3
    assert pattern.search(colours.data)
    for terminal in without:
        assert b"failed to load 'broken'" in terminal.data
        assert b"\x1b[31m" not in terminal.data


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

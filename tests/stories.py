"""Pages that are worked through: their commands are run, and must print what stands below them.

A page is a story. Its examples are worked through from top to bottom in a folder, which what they
print calls /srv:

* `<!-- file: PATH -->` above a block saves it as PATH.
* A `python` block without that comment is run as a script.
* In a `console` block, a line that begins with `$ ` is run, and must print what stands below it, if
  anything does. `$ pbhost serve ...` starts a host, which serves until the next one starts.
* `<!-- log -->` above a `text` block: the host that runs now writes these lines to its log. Here
  and below `pbhost serve`, what lines of `...` separate may come in any order.
* `<!-- needs: MODULE -->`: the page is skipped where this module is not installed.
* Any other `text` block is an illustration, and `<!-- not run: REASON -->` makes one of any block.

`...` stands for any text, and on a line of its own for any lines. Clients find the host although
they are told `localhost:8001`, `localhost:8000` for HTTP, or `localhost:8002` for metrics, and
commands if they are told no address. What
differs from run to run (times, process ids, ports, folders) is not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import DEADLINE, RunningHost, Serve, wait_until

SERVE = "pbhost serve "
HERE = "/srv"
"""The name of the folder in printed output."""

PART = re.compile(
    r"^(?:<!-- (?P<word>file|log|not run)(?:: (?P<argument>[^\n]+?))? -->\n+)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block."""

_NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
_LOG_HEAD = re.compile(r"^([IWE])\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ (\w+\.py):\d+\]", re.MULTILINE)
_WITHOUT_URL = re.compile(
    r"(?:^|\| )pbhost (?:infer|models|wait|chat|top|bench) (?!\w+://)", re.MULTILINE
)


def needs(page: Path) -> list[str]:
    """The modules without which the page is skipped."""
    return _NEEDS.findall(page.read_text())


@dataclass(frozen=True)
class Block:
    """A fenced block, with the word and the argument of the comment above it."""

    language: str
    text: str
    word: str
    argument: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in PART.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        word, argument = found["word"] or "", found["argument"] or ""
        yield Block(found["language"], found["text"], word, argument, line)


def comparable(text: str) -> str:
    """The text without what differs from run to run."""
    text = _LOG_HEAD.sub(r"\1 \2]", text)
    text = re.sub(r"(127\.0\.0\.1|0\.0\.0\.0|localhost):\d+", "HOST", text)
    text = re.sub(r"^\d\d:\d\d:\d\d (?=[A-Z]+ )", "", text, flags=re.MULTILINE)
    text = re.sub(r"in \d+\.\d+( ?m?s)\b", r"in N\1", text)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").split("\n"))


def pattern(expected: str) -> re.Pattern[str]:
    """The pattern that matches the expected text."""
    lines = comparable(expected).splitlines()
    return re.compile(
        "".join(
            r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
            for line in lines
        )
    )


def steps(console: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with its expected output."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected.strip("\n")


def with_ports(host: RunningHost, text: str) -> str:
    """The text with the ports of a host instead of the usual ones."""
    text = _WITHOUT_URL.sub(r"\g<0>http://localhost:8000 ", text)
    text = text.replace("localhost:8001", host.url)
    if "localhost:8000" in text:
        text = text.replace("localhost:8000", host.http_url)
    if "localhost:8002" in text:
        text = text.replace("localhost:8002", host.metrics_url)
    return text


class Story:
    """One page, worked through in one folder, whose programs are told where the host is."""

    def __init__(self, folder: Path, serve: Serve) -> None:
        self.folder = folder
        self.host: RunningHost | None = None
        self._serve = serve
        programs = (path for path in folder.iterdir() if path.suffix in (".py", ".mjs"))
        self._scripts = {path.name: path.read_text() for path in programs}

    def tell(self, page: Path) -> None:
        """Does what the page says."""
        for block in blocks(page):
            failure = ""
            try:
                self._tell(block)
            except AssertionError as error:
                failure = f"{page.name}:{block.line}: {error}"
            if failure:
                pytest.fail(failure, pytrace=False)
        if self.host is not None and self.host.process.poll() is None:
            assert self.host.stop() == 0, self.host.output

    def _tell(self, block: Block) -> None:
        if block.word == "not run":
            return
        if block.word == "log":
            self._await_log(block.text)
        elif block.word == "file":
            self._save(block.argument, block.text)
        elif block.language == "python":
            name = f"block_{block.line}.py"
            self._save(name, block.text)
            self._run(f"python {name}", "")
        elif block.language == "console":
            for command, expected in steps(block.text):
                if command.startswith(SERVE):
                    self._start(command, expected)
                else:
                    self._run(command, expected)

    def _save(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self._scripts[name] = text

    def _as_printed(self, text: str) -> str:
        return text.replace(str(self.folder), HERE)

    def _start(self, command: str, expected: str) -> None:
        if self.host is not None:
            self.host.stop()
        flags = shlex.split(command)[2:]
        named = "--model-repository="
        (repository,) = (f for f in flags if f.startswith(named) or not f.startswith("-"))
        flags.remove(repository)
        env = {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "1"}
        repository = repository.removeprefix(named)
        place = repository if "://" in repository else Path(repository)
        host = self.host = self._serve(place, *flags, env=env)
        wait_until(
            lambda: (
                "Started GRPCInferenceService" in host.output or host.process.poll() is not None
            ),
            f"an end of the start of {command}",
        )
        if host.process.poll() is None:
            host.wait_started()
        if expected:
            self._await_log(expected)

    def _await_log(self, expected: str) -> None:
        host = self.host
        assert host is not None, "no host runs"
        parts = re.split(r"^\.\.\.\n", expected + "\n", flags=re.M)
        # Lines of the host itself may come between the lines that a model prints.
        wanted = [pattern(re.sub(r"\n(?=.)", "\n...\n", part)) for part in parts]
        end = time.monotonic() + DEADLINE
        while True:
            over = host.process.poll() is not None or time.monotonic() > end
            log = comparable(self._as_printed(host.output))
            missing = [part.pattern for part in wanted if not part.search(log)]
            if not missing:
                return
            assert not over, f"the log lacks {missing}:\n{log}"
            threading.Event().wait(0.01)

    def _run(self, command: str, expected: str) -> None:
        if self.host is not None:
            command = with_ports(self.host, command)
            for name, text in self._scripts.items():
                (self.folder / name).write_text(with_ports(self.host, text))
        binaries = os.path.dirname(sys.executable)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{binaries}:{os.environ['PATH']}",
                "COLUMNS": "80",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # examples need none, and start sooner
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
        )
        printed = comparable(self._as_printed(done.stdout))
        if expected:
            wanted = pattern(expected)
            assert wanted.fullmatch(printed), f"$ {command}\n{printed}\nand not\n{expected}"
        else:
            assert done.returncode == 0, f"$ {command}\n{printed}"


def tell_example(example: Path, folder: Path, serve: Serve) -> None:
    """Runs the commands of an example's README in a copy of the example in the current folder."""
    for module in needs(example / "README.md"):
        pytest.importorskip(module)
    if (example / "package.json").exists() and not (example / "node_modules").exists():
        pytest.skip("its packages of Node are missing: make node-client")
    shutil.copytree(example, folder, symlinks=True, dirs_exist_ok=True)
    Story(folder, serve).tell(folder / "README.md")

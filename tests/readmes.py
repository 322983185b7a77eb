"""Examples that build their own models: the three commands that each README gives, run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import DEADLINE, ROOT, RunningHost


@dataclass(frozen=True)
class Walkthrough:
    """A console block: build models, serve them, send requests, and the expected output."""

    build: str
    send_request: str
    expected: str
    folder: str

    def answer(self, host: RunningHost) -> str:
        """The output of the client."""
        return run(
            self.send_request.replace("localhost:8001", host.url).replace(
                "localhost:8000", host.http_url
            )
        )


def walkthroughs(example: str) -> list[Walkthrough]:
    """The console blocks in the README of a folder of examples/."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    found: list[Walkthrough] = []
    for console in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        build, start, send_request = re.findall(r"^\$ (.+)$", console, re.MULTILINE)
        folder = start.removeprefix("pbhost serve --model-repository=")
        assert folder in shlex.split(build), "the built folder is the served one"
        found.append(
            Walkthrough(build, send_request, console.partition(f"$ {send_request}\n")[2], folder)
        )
    return found


def write(examples: Iterable[Walkthrough], repository: Path) -> None:
    """Builds models there instead of in the folders that the READMEs have.

    All commands run in one process, as importing a framework takes longer than what they do.
    """
    commands = [shlex.split(each.build.replace(each.folder, str(repository))) for each in examples]
    lines = [
        "import runpy, sys",
        *(
            f"sys.argv = {each[1:]}; runpy.run_path(sys.argv[0], None, '__main__')"
            for each in commands
        ),
    ]
    run(shlex.join(["python", "-c", "\n".join(lines)]))


def run(command: str) -> str:
    """The output of a `python ...` command."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_digits(text: str) -> str:
    """With scores to two places: the rest depends on the machine's arithmetic."""
    return re.sub(r"(0\.\d\d)\d+", r"\1", text)

"""The example of frameworks, by the commands of its README."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Serve

for library in ("torch", "onnx", "onnxruntime"):
    pytest.importorskip(library, reason=f"pip install {library}")

README = (ROOT / "examples" / "frameworks" / "README.md").read_text()


def run(command: str) -> str:
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_commands_work(serve: Serve, tmp_path: Path) -> None:
    (console,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    build, start, ask = re.findall(r"^\$ (.+)$", console, re.MULTILINE)
    assert start == "pbhost serve --model-repository=/tmp/flowers"
    run(build.replace("/tmp/flowers", str(tmp_path)))
    host = serve(tmp_path).wait_started()
    expected = console.partition(f"$ {ask}\n")[2]
    assert run(ask.replace("localhost:8001", host.url)) == expected

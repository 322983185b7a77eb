"""Every example of model_repository/, run by the command that its README gives."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT, RunningHost, Serve

README = (ROOT / "model_repository" / "README.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \|.*\| `python (examples/[^`]+)` \|$", README, re.MULTILINE)

EXPECTED = {
    "add_sub": "= [[11. 22. 33. 44.]]",
    "identity_types": "STRING  object   [3] same: True",
    "auto_config": "6 words: to be or not to be",
    "multi_file": "[-40.   32.   97.9 212. ] in Fahrenheit",
    "image_preprocess": "disc.jpg (480, 640, 3) -> (3, 224, 224)",
    "bls_loop": "[ 32.  64.  96. 128.] after 5 steps",
}


@pytest.fixture(scope="module")
def host(module_serve: Serve) -> RunningHost:
    return module_serve(ROOT / "model_repository").wait_started()


def test_every_model_has_a_row_and_an_expectation() -> None:
    models = {path.name for path in (ROOT / "model_repository").iterdir() if path.is_dir()}
    models.discard("__pycache__")
    assert {name for name, _ in ROWS} == models == set(EXPECTED)


@pytest.mark.parametrize(("name", "command"), ROWS)
def test_the_readmes_command_works(host: RunningHost, name: str, command: str) -> None:
    arguments = shlex.split(command.replace("localhost:8001", host.url))
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout


def test_the_demo_shows_its_queries_and_stops_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXPECTED["add_sub"] in done.stdout
    assert EXPECTED["bls_loop"] in done.stdout
    assert "the host has stopped with exit status 0" in done.stdout

"""What type checkers understand of code that authors write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
REVEALED = {
    "author_model.py": [
        ("builtins.str", "str"),
        ("builtins.set[builtins.str]", "set[str]"),
        ("builtins.list[builtins.int]", "list[int]"),
        ("pb_utils._response.InferenceResponse", "InferenceResponse"),
        (
            "builtins.list[pb_utils._response.InferenceResponse]",
            "list[InferenceResponse]",
        ),
    ],
    "author_test.py": [
        ("pb_utils.testing._harness.ModelHarness", "ModelHarness"),
        ("builtins.tuple[Any, ...]", "tuple[Any, ...]"),
        (
            "builtins.list[pb_utils._response.InferenceResponse]",
            "list[InferenceResponse]",
        ),
        ("builtins.list[builtins.str]", "list[str]"),
    ],
}


def run(*arguments: str) -> tuple[int, str]:
    """Run a checker as a module of this interpreter, on this checkout."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def mypy(name: str) -> tuple[int, str]:
    return run("mypy", "--strict", "--no-error-summary", str(HERE / name))


def pyright(name: str) -> tuple[int, str]:
    return run("basedpyright", "--pythonpath", sys.executable, str(HERE / name))


@pytest.mark.parametrize("name", REVEALED)
def test_mypy_accepts_and_understands_what_authors_write(name: str) -> None:
    code, output = mypy(name)
    assert code == 0, output
    assert re.findall(r'Revealed type is "(.*)"', output) == [mine for mine, _ in REVEALED[name]]


@pytest.mark.parametrize("name", REVEALED)
def test_pyright_accepts_and_understands_what_authors_write(name: str) -> None:
    code, output = pyright(name)
    assert code == 0, output
    revealed = re.findall(r'information: Type of ".*" is "(.*)"', output)
    assert revealed == [theirs for _, theirs in REVEALED[name]]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checkers_find_the_mistakes_of_authors(checker: object) -> None:
    assert callable(checker)
    code, output = checker("author_mistakes.py")
    assert code != 0
    lines = (HERE / "author_mistakes.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# WRONG")}
    found = re.findall(r"author_mistakes\.py:(\d+):(?:\d+ -)? error", output)
    assert set(map(int, found)) == wrong, output


def test_every_public_name_has_a_complete_type() -> None:
    code, output = run("basedpyright", "--verifytypes", "pb_utils", "--ignoreexternal")
    assert code == 0, output
    assert "Type completeness score: 100%" in output

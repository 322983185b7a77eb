"""The installed package, on the oldest and the newest Python that it names, and what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pythons import empty_venv, interpreter, need_index

PYPROJECT = (ROOT / "pyproject.toml").read_text()
VERSIONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
DEPENDENCIES = PYPROJECT.partition("\ndependencies = [")[2].partition("\n]")[0]
OLDEST = re.findall(r'^ +"([\w-]+)(?:\[\w+\])?>=([\d.]+)', DEPENDENCIES, re.MULTILINE)
INSTALL_SECONDS = 300.0
"""The package index may be far away and the machine busy."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.test_all(reason="pip installs everything twice, which takes a minute"),
]


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command; fails with its output if it fails."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{output}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy, as building writes next to the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    need_index(folder / "index")
    source = folder / "source"
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    options = ("--quiet", "--no-deps", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    (built,) = folder.glob("pbhost-*.whl")
    return built


def serve_installed(wheel: Path, version: str, folder: Path, *pip_options: str) -> str:
    """Installs the wheel for a Python, serves a model, sends a request; returns the output."""
    venv = empty_venv(folder / "venv", interpreter(version))
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", *pip_options, wheel, cwd=folder)
    return run(python, ROOT / "tests" / "packaging" / "serve_wheel.py", cwd=folder)


def test_the_newest_python_serves_a_model_with_the_newest_releases(
    wheel: Path, tmp_path: Path
) -> None:
    output = serve_installed(wheel, VERSIONS[-1], tmp_path)
    assert f"python {VERSIONS[-1]}." in output


def test_the_oldest_python_serves_a_model_with_the_oldest_allowed_releases(
    wheel: Path, tmp_path: Path
) -> None:
    oldest = tmp_path / "oldest.txt"
    oldest.write_text("".join(f"{name}=={release}\n" for name, release in OLDEST))
    options = ("--only-binary=:all:", f"--constraint={oldest}")
    output = serve_installed(wheel, VERSIONS[0], tmp_path, *options)
    assert f"python {VERSIONS[0]}." in output

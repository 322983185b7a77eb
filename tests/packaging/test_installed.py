"""The installed package, on the oldest and the newest Python that it names, and what it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
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


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs a command with environment variables; fails with its output if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{output}"
    return done.stdout


def build_wheel(folder: Path, **variables: str) -> Path:
    """Builds a wheel of this checkout from a copy, as building writes next to the sources."""
    need_index(folder / "index")
    source = folder / "source"
    ignored = shutil.ignore_patterns(
        *(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks"),
        *("*.so", "_lane.c"),
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    options = ("--quiet", "--no-deps", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder, **variables)
    (built,) = folder.glob("pbhost-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for all versions of Python, which is without the compiled lane."""
    return build_wheel(tmp_path_factory.mktemp("wheel"), PBHOST_LANE="0")


@pytest.mark.parametrize(("compiler", "built"), [("cc", True), ("false", False)])
def test_a_wheel_has_the_compiled_lane_if_there_is_a_compiler(
    tmp_path: Path, compiler: str, built: bool
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip("needs a compiler")
    names = zipfile.ZipFile(build_wheel(tmp_path, CC=compiler)).namelist()
    assert (
        any(name.startswith("host/lane/_lane.") and name.endswith(".so") for name in names) == built
    )
    assert "host/lane/__init__.py" in names


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
    # posix_ipc has no wheel for the newest Python.
    options = ("--only-binary=:all:", "--no-binary=posix_ipc")
    output = serve_installed(wheel, VERSIONS[-1], tmp_path, *options)
    assert f"python {VERSIONS[-1]}." in output


def test_the_oldest_python_serves_a_model_with_the_oldest_allowed_releases(
    wheel: Path, tmp_path: Path
) -> None:
    oldest = tmp_path / "oldest.txt"
    oldest.write_text("".join(f"{name}=={release}\n" for name, release in OLDEST))
    options = ("--only-binary=:all:", f"--constraint={oldest}")
    output = serve_installed(wheel, VERSIONS[0], tmp_path, *options)
    assert f"python {VERSIONS[0]}." in output

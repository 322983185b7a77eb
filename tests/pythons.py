"""Python environments for tests, made of what this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.conftest import DEADLINE

NEEDED = ("numpy", "pyzmq", "msgspec")

EVALUATES = """
import os, sys, json, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "COMMAND", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
            answer = np.array([str(eval(text)).encode()], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", answer)]))
        return responses
"""
"""A model that evaluates an expression: `command(client, "1 + 1", "model")`."""


def config(**parameters: str) -> str:
    """A configuration with these parameters."""
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in parameters.items()
    )


def own_venv(path: Path) -> Path:
    """A venv of this interpreter, made without a network: it uses the packages installed here."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", path], check=True, timeout=DEADLINE
    )
    (site_packages(path) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return path


def empty_venv(path: Path, python: str = sys.executable) -> Path:
    """A venv with nothing in it."""
    subprocess.run([python, "-m", "venv", "--without-pip", path], check=True, timeout=DEADLINE)
    return path


def site_packages(venv: Path) -> Path:
    """Where its packages lie."""
    (found,) = (venv / "lib").glob("python*/site-packages")
    return found


def interpreter(version: str) -> str:
    """A Python of another version, of this machine's; skips the test if there is none."""
    for found in sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*")):
        if (found / "bin" / "python").exists():
            return str(found / "bin" / "python")
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        done = subprocess.run([on_path, "-c", "import venv"], capture_output=True)
        if done.returncode == 0:
            return on_path
    pytest.skip(f"there is no Python {version} here")


def full_venv(path: Path, python: str) -> Path:
    """A venv of another Python with what stubs need; skips the test without a package index."""
    subprocess.run([python, "-m", "venv", path], check=True, capture_output=True, timeout=300)
    pip: list[str | Path] = [path / "bin" / "python", "-m", "pip", "install", "--quiet", *NEEDED]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return path


def need_index(folder: Path) -> None:
    """Skips the test if what stubs need cannot be downloaded."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, "msgspec"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")


def pack(folder: Path, archive: Path) -> Path:
    """Packs a folder as conda-pack does: its content at the top."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        file.add(folder, ".")
    return archive


def touch(path: Path, seconds: int) -> None:
    """Changes a file's time."""
    changed = path.stat().st_mtime + seconds
    os.utime(path, (changed, changed))

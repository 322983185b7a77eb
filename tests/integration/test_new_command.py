"""`pbhost new`: every kind of project is written, checked, tested, run, served and asked."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEADLINE, ROOT, RunningHost, Serve

KINDS = ("plain", "batched", "decoupled", "bls", "image", "onnx", "chat")
PRINTED = {
    "plain": "[2. 5.]",
    "batched": "[[0.6 0.  0.8]\n [0.  1.  0. ]]",
    "decoupled": "to\nbe\nor\nnot\nto\nbe",
    "bls": "[3. 6.]",
    "image": "red [",
    "onnx": "[[2. 4. 6.]]",
    "chat": "Who are you?",
}
"""What the client of each kind prints, or how that begins."""


def pbhost(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return command(folder, sys.executable, "-m", "pbhost", *arguments)


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # the projects need no plugin
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def commands(readme: str) -> list[list[str]]:
    """The commands of a README, split into words."""
    return [shlex.split(line) for line in re.findall(r"^\$ (.+)$", readme, re.MULTILINE)]


def with_ports(words: list[str], host: RunningHost) -> list[str]:
    places = {"localhost:8000": host.http_url, "localhost:8001": host.url}
    for told, real in places.items():
        words = [word.replace(told, real) for word in words]
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_works_as_its_readme_says(kind: str, tmp_path: Path, serve: Serve) -> None:
    if kind == "onnx" and importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed")
    folder = tmp_path / "project"
    written = pbhost("new", str(folder), f"--kind={kind}", "--model=mine")
    assert (written.returncode, written.stderr) == (0, "")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert written.stdout.splitlines()[: len(files)] == list(map(str, files))
    assert (folder / "models" / "mine" / "config.pbtxt") in files
    assert not [path for path in files if b"__MODEL__" in path.read_bytes()]
    host: RunningHost | None = None
    asked = []
    for words in commands((folder / "README.md").read_text()):
        if words[:2] == ["pbhost", "serve"]:
            assert words[2:] == ["--dev", "--model-repository=models"]
            host = serve(folder / "models", "--dev").wait_started()
            continue
        if host is not None:
            words = with_ports(words, host)
        program = {"pbhost": [sys.executable, "-m", "pbhost"], "python": [sys.executable]}[words[0]]
        done = command(folder, *program, *words[1:])
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        asked.append(words[1])
        if words[1] == "check":
            assert re.fullmatch(r"\d models?: 0 errors, 0 warnings\n", done.stdout)
        elif words[1] == "client.py":
            assert done.stdout.startswith(PRINTED[kind])
        elif words[1] in ("run", "infer"):
            assert done.stdout.startswith("response 1")
    assert asked == ["check", "-m", "run", "client.py", "infer"]


def test_the_python_code_is_tidy(tmp_path: Path) -> None:
    for kind in KINDS:
        assert pbhost("new", str(tmp_path / kind), "--kind", kind).returncode == 0
    rules = ["--isolated", "--line-length=100"]
    for arguments in (["check", *rules, "--select=E,F,W,I,B"], ["format", "--check", *rules]):
        done = command(tmp_path, sys.executable, "-m", "ruff", *arguments, ".")
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_file_of_onnx_is_what_its_script_makes(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    folder = tmp_path / "project"
    assert pbhost("new", str(folder), "--kind=onnx").returncode == 0
    file = folder / "models" / "double" / "1" / "model.onnx"
    before = file.read_bytes()
    file.unlink()
    done = command(folder, sys.executable, "make_model.py")
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == before


def test_a_folder_that_exists_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    done = pbhost("new", str(folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"pbhost new: '{folder}' exists already\n"
    assert not list(folder.iterdir())
    file = tmp_path / "file"
    file.write_text("mine")
    assert pbhost("new", str(file)).returncode == 1
    assert file.read_text() == "mine"
    below = pbhost("new", str(file / "project"))
    assert below.stderr == f"pbhost new: cannot write '{file / 'project'}': Not a directory\n"


def test_wrong_kinds_and_names_are_told(tmp_path: Path) -> None:
    for flag, text in {
        "--kind=picture": "One of plain, batched, decoupled, bls, image, onnx, chat.",
        "--model=a/b": "expected letters, digits, '_' and '-', got 'a/b'",
    }.items():
        done = pbhost("new", str(tmp_path / "project"), flag)
        assert done.returncode == 2
        assert text in done.stderr
    assert not (tmp_path / "project").exists()

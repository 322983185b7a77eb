"""Completion of the command line, in a real bash at a terminal of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from host.options.flag_parser import Status
from host.options.options import FLAGS
from tests.conftest import DEADLINE

# Asks bash for the completions of a line, as its completion key does.
ASK = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
read -r -a COMP_WORDS <<< "${2//=/ = }"
[[ $2 == *' ' || $2 == *= ]] && [[ $2 != *= ]] && COMP_WORDS+=('')
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
compopt() { :; }
_pbhost
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "pbhost.bash"
    path.write_text(printed("bash"))
    return path


def printed(shell: str) -> str:
    command = [sys.executable, "-m", "host", "completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    return done.stdout


def complete(script: Path, line: str, folder: Path | None = None) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script), line],
        capture_output=True, text=True, timeout=DEADLINE, check=True, cwd=folder,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_flags_values_and_files_are_completed(script: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "other").mkdir()
    assert complete(script, "pbhost s") == ["serve", "stacks"]
    assert {"serve", "infer", "completion"} <= set(complete(script, "pbhost "))
    assert complete(script, "pbhost serve --grpc-p") == ["--grpc-port="]
    assert complete(script, "pbhost check --st") == ["--strict"]
    for start in ("pbhost serve --log-format=", "pbhost serve --log-format "):
        assert complete(script, start) == ["default", "ISO8601", "json"]
    assert complete(script, "pbhost serve --log-format=j") == ["json"]
    assert complete(script, "pbhost serve --allow-http=t") == ["true"]
    assert complete(script, "pbhost serve --model-repository=mo", tmp_path) == ["models"]
    assert complete(script, "pbhost serve --model-repository o", tmp_path) == ["other"]
    assert complete(script, "pbhost check m", tmp_path) == ["models"]
    assert complete(script, "pbhost completion z") == ["zsh"]


def test_every_flag_that_has_an_effect_is_completed(script: Path) -> None:
    found = {word.rstrip("=") for word in complete(script, "pbhost serve --")}
    effective = {f"--{flag.name}" for flag in FLAGS if flag.status is Status.HONOURED}
    assert found == effective | {"--help"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(printed(shell))
    assert "grpc-port" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_unknown_shell_is_an_error() -> None:
    command = [sys.executable, "-m", "host", "completion", "csh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    expected = "pbhost completion: expected bash, zsh or fish, got 'csh'\n"
    assert (done.returncode, done.stderr) == (2, expected)

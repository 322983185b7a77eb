"""Completion of the command line, in real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from host.options.flags import Status
from host.options.server_flags import FLAGS
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
    command = [sys.executable, "-m", "pbhost", "completion", shell]
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
    assert complete(script, "pbhost new x --kind=b") == ["batched", "bls"]


def test_every_flag_that_has_an_effect_is_completed(script: Path) -> None:
    found = {word.rstrip("=") for word in complete(script, "pbhost serve --")}
    effective = {f"--{flag.name}" for flag in FLAGS if flag.status is Status.HONOURED}
    assert found == effective | {"--help"}


# The completions of lines in shells other than bash, by the line.
LINES = {
    "pbhost s": {"serve", "stacks"},
    "pbhost serve --grpc-p": {"--grpc-port"},
    "pbhost serve --log-format ": {"default", "ISO8601", "json"},
    "pbhost serve --log-format=j": {"--log-format=json"},
    "pbhost new x --kind=b": {"--kind=batched", "--kind=bls"},
    "pbhost serve --model-repository=mo": {"--model-repository=models/"},
    "pbhost check mo": {"models/"},
    "pbhost check --st": {"--strict"},
    "pbhost completion z": {"zsh"},
}
# Keys that insert all completions, and that write the line to a file.
ZSH = r"""
autoload -U compinit; compinit -D -u
source ./script
insert-all() { _main_complete "$@"; compstate[insert]=all; compstate[list]= }
zle -C insert-all complete-word insert-all
bindkey '^X^A' insert-all
show() { print -r -- "$BUFFER" >> ./lines; BUFFER= }
zle -N show; bindkey '^X^P' show
print ready >> ./lines
"""
INSERT_ALL, SHOW = "\x18\x01", "\x18\x10"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a shell runs."""
    (tmp_path / "models").mkdir()
    return tmp_path


def test_fish_completes_commands_flags_values_and_files(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs the program fish (Debian: apt-get install fish)")
    (folder / "script").write_text(printed("fish"))
    for line, expected in LINES.items():
        done = subprocess.run(
            ["fish", "--no-config", "--command", f"source script; complete -C '{line}'"],
            cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=True,
            env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        found = {shown.split("\t")[0] for shown in done.stdout.splitlines()}
        assert (found, done.stderr) == (expected, ""), line


def test_zsh_completes_commands_flags_values_and_files(folder: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("needs the program zsh (Debian: apt-get install zsh)")
    (folder / "script").write_text(printed("zsh"))
    (folder / "setup").write_text(ZSH)
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, env={**os.environ, "TERM": "dumb", "HOME": str(folder)},
    )  # fmt: skip
    os.close(theirs)
    shown: list[str] = []

    def type_line(text: str) -> str:
        """What the shell has written to the file for it."""
        os.write(ours, text.encode())
        deadline = time.monotonic() + DEADLINE
        written = folder / "lines"
        while not written.exists() or len(written.read_text().splitlines()) <= len(shown):
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 1 << 16)  # its echo; a full terminal would stop the shell
        shown.append(written.read_text().splitlines()[-1])
        return shown[-1]

    try:
        assert type_line("source ./setup\n") == "ready"
        for line, expected in LINES.items():
            completed = type_line(line + INSERT_ALL + SHOW)
            begin = line.rpartition(" ")[0]
            assert completed.startswith(begin)
            found = set(completed.removeprefix(begin).split())
            assert {word.removesuffix("=") for word in found} == expected, line
    finally:
        os.kill(shell.pid, signal.SIGKILL)
        shell.wait(DEADLINE)
        os.close(ours)


def test_an_unknown_shell_is_an_error() -> None:
    command = [sys.executable, "-m", "pbhost", "completion", "csh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    expected = "pbhost completion: expected bash, zsh or fish, got 'csh'\n"
    assert (done.returncode, done.stderr) == (2, expected)

"""Reading the requirements of models, and the keys of their environments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from host.environments.requirements import STUB_REQUIREMENTS, read_requirements
from host.errors import ErrorCode, HostError
from tests.conftest import ROOT


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(HostError) as caught:
        read_requirements(path, path.parent)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_a_requirements_file_is_given_to_pip_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "six\n")
    assert read_requirements(path, path.parent).arguments == [
        "--requirement",
        str(path),
        "--",
        *STUB_REQUIREMENTS,
    ]
    assert "msgspec" in " ".join(STUB_REQUIREMENTS)


def test_the_key_depends_on_the_content_and_not_on_the_folder(tmp_path: Path) -> None:
    one = write(tmp_path, "one/requirements.txt", "six\n")
    two = write(tmp_path, "two/requirements.txt", "six\n")
    assert read_requirements(one, one.parent).key == read_requirements(two, two.parent).key
    write(tmp_path, "two/requirements.txt", "six==1.16\n")
    assert read_requirements(one, one.parent).key != read_requirements(two, two.parent).key


@pytest.mark.parametrize(
    "line", ["-r more.txt", "-c more.txt", "--requirement=more.txt", "--constraint more.txt"]
)
def test_a_change_of_an_included_file_changes_the_key(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "requirements.txt", f"{line}  # and more\n")
    write(tmp_path, "more.txt", "six\n-r deep/most.txt\n")
    write(tmp_path, "deep/most.txt", "idna\n-r ../requirements.txt\n")
    before = read_requirements(path, path.parent)
    assert list(before.files) == ["requirements.txt", "more.txt", "deep/most.txt"]
    write(tmp_path, "deep/most.txt", "idna>3\n")
    assert read_requirements(path, path.parent).key != before.key


def test_included_urls_are_left_to_pip(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "-c https://example.org/constraints.txt\n")
    found = read_requirements(path, path.parent)
    assert list(found.files) == ["requirements.txt"]
    assert found.remote


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("-r ../secret.txt", "../secret.txt"),
        ("-r../secret.txt", "../secret.txt"),
        ("--requirem=../secret.txt", "../secret.txt"),
        ("--pre -c '../secret.txt'", "../secret.txt"),
        ("-c \\\n../secret.txt", "../secret.txt"),
        ("-r /etc/passwd", "/etc/passwd"),
        ("-r deep/../../secret.txt", "deep/../../secret.txt"),
        ("-r ${OUTSIDE}/secret.txt", "/outside/secret.txt"),
        ("-r file:///etc/passwd", "/etc/passwd"),
        ("-r FILE:/etc/%70asswd", "/etc/passwd"),
        ("-c file://host/etc/passwd", "//host/etc/passwd"),
        ("-e ..", ".."),
        ("-e git+file:///srv/code@main#egg=code", "/srv/code"),
        ("--editable=../code[gpu]", "../code"),
        ("../code", "../code"),
        ("/srv/code[gpu] ; python_version > '3'", "/srv/code"),
        ("code @ file:///srv/code.whl", "/srv/code.whl"),
        ("code[gpu]@file:/srv/code.whl", "/srv/code.whl"),
        ("-f ../wheels", "../wheels"),
        ("--find-links=file:///srv/wheels", "/srv/wheels"),
        ("--extra-index-url /srv/index", "/srv/index"),
        ("-r link.txt", "link.txt"),
        ("./folder", "./folder"),
        ("link.whl", "link.whl"),
    ],
)
def test_files_outside_the_models_directory_are_refused_by_name(
    tmp_path: Path, line: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIDE", "/outside")
    model = tmp_path / "model"
    path = write(model, "requirements.txt", f"six\n{line}\n")
    secret = write(tmp_path, "secret.txt", "root:secret\n")
    (model / "link.txt").symlink_to(secret)
    (model / "link.whl").symlink_to(secret)
    (model / "folder").symlink_to(tmp_path)
    assert refusal(path) == (
        f"cannot use the requirements {path}: line 2 names '{value}', which is outside of the"
        f" model's directory {model}"
    )


def test_an_included_file_may_not_include_files_outside(tmp_path: Path) -> None:
    path = write(tmp_path, "model/requirements.txt", "-r deep/more.txt\n")
    more = write(tmp_path, "model/deep/more.txt", "-r ../../secret.txt\n")
    write(tmp_path, "secret.txt", "root:secret\n")
    assert refusal(path) == (
        f"cannot use the requirements {more}: line 1 names '../../secret.txt', which is outside of"
        f" the model's directory {tmp_path}/model"
    )


def test_a_requirements_file_that_is_a_link_to_another_directory_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model" / "requirements.txt"
    path.parent.mkdir()
    path.symlink_to(write(tmp_path, "secret.txt", "root:secret\n"))
    assert refusal(path) == (
        f"cannot use the requirements {path}: it is outside of the model's directory {path.parent}"
    )


@pytest.mark.parametrize(
    "line",
    [
        "six==1.16 --hash=sha256:abc/def ; python_version > '3'",
        "# -r ../secret.txt",
        "--index-url https://user:word@example.org/simple/../simple",
        "-e ./code[gpu]",
        "./wheels/code.whl",
        "code @ file:${HERE}/wheels/code.whl",
        "code @ https://example.org/code.whl",
        "git+https://example.org/code.git@main#egg=code",
        "-f wheels --no-index",
        "-r link.txt",
    ],
)
def test_files_in_the_models_directory_and_urls_are_accepted(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", str(tmp_path))
    path = write(tmp_path, "requirements.txt", f"{line}\n")
    (tmp_path / "link.txt").symlink_to(write(tmp_path, "..data/more.txt", "six\n"))
    assert read_requirements(path, tmp_path).files


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("-r ../x\n".encode("utf-16"), "line 1 is not valid UTF-8"),
        (b"# coding: utf-7\n+AC0-r ../x\n", "its encoding is 'utf-7', expected UTF-8"),
        (b"six\n--no-such-option=../x\n", "line 2: no such option: --no-such-option"),
        (b"-r 'x\n", "line 1: No closing quotation"),
    ],
)
def test_lines_that_pip_may_read_differently_are_refused(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    path = tmp_path / "requirements.txt"
    path.write_bytes(data)
    assert refusal(path) == f"cannot use the requirements {path}: {reason}"


@pytest.mark.parametrize("item", ["../code", "code @ file:///srv/code", "/srv/code.whl"])
def test_a_pyproject_file_that_names_paths_outside_is_refused(tmp_path: Path, item: str) -> None:
    text = f'[project]\ndependencies = ["{item}"]\n'
    path = write(tmp_path, "model/pyproject.toml", text)
    assert "is outside of the model's directory" in refusal(path)


def test_a_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "-r none.txt\n")
    assert refusal(path) == (
        f"cannot read the requirements {tmp_path}/none.txt: No such file or directory"
    )


def test_a_pyproject_file_gives_its_dependencies(tmp_path: Path) -> None:
    text = '[project]\nname = "m"\nrequires-python = ">=3.8"\ndependencies = ["six>=1", "idna"]\n'
    found = read_requirements(write(tmp_path, "pyproject.toml", text), tmp_path)
    assert found.arguments == ["--", "six>=1", "idna", *STUB_REQUIREMENTS]
    assert found.python == ">=3.8"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[tool.x]\n", "it has no list 'dependencies' in [project]"),
        ('[project]\ndynamic = ["dependencies"]\n', "it has no list 'dependencies' in [project]"),
        ("project = 3\n", "it has no list 'dependencies' in [project]"),
        ('[project]\ndependencies = "six"\n', "[project] dependencies is not a list of strings"),
        ("[project]\ndependencies = [3]\n", "[project] dependencies is not a list of strings"),
        ("[project\n", "Expected ']' at the end of a table declaration (at line 1, column 9)"),
    ],
)
def test_a_pyproject_file_without_a_list_of_dependencies_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = write(tmp_path, "pyproject.toml", text)
    assert refusal(path) == f"cannot use the requirements {path}: {reason}"


def test_a_stub_needs_no_newer_numpy_than_the_host_asks_for() -> None:
    """NumPy 1.19 has no `numpy.typing`."""
    assert STUB_REQUIREMENTS[0] == "numpy>=1.19"
    script = "import sys; sys.modules['numpy.typing'] = None; import stub.worker"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

"""Reading the requirements of models, and the keys of their environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.environments.requirements import STUB_REQUIREMENTS, read_requirements
from host.errors import ErrorCode, HostError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(HostError) as caught:
        read_requirements(path)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_a_requirements_file_is_given_to_pip_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "six\n")
    assert read_requirements(path).arguments == [
        "--requirement",
        str(path),
        "--",
        *STUB_REQUIREMENTS,
    ]
    assert "msgspec" in " ".join(STUB_REQUIREMENTS)


def test_the_key_depends_on_the_content_and_not_on_the_folder(tmp_path: Path) -> None:
    one = write(tmp_path, "one/requirements.txt", "six\n")
    two = write(tmp_path, "two/requirements.txt", "six\n")
    assert read_requirements(one).key == read_requirements(two).key
    write(tmp_path, "two/requirements.txt", "six==1.16\n")
    assert read_requirements(one).key != read_requirements(two).key


@pytest.mark.parametrize(
    "line", ["-r more.txt", "-c more.txt", "--requirement=more.txt", "--constraint more.txt"]
)
def test_a_change_of_an_included_file_changes_the_key(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "requirements.txt", f"{line}  # and more\n")
    write(tmp_path, "more.txt", "six\n-r deep/most.txt\n")
    write(tmp_path, "deep/most.txt", "idna\n-r ../requirements.txt\n")
    before = read_requirements(path)
    assert list(before.files) == ["requirements.txt", "more.txt", "deep/most.txt"]
    write(tmp_path, "deep/most.txt", "idna>3\n")
    assert read_requirements(path).key != before.key


def test_included_urls_are_left_to_pip(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "-c https://example.org/constraints.txt\n")
    assert list(read_requirements(path).files) == ["requirements.txt"]


def test_a_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "-r none.txt\n")
    assert refusal(path) == (
        f"cannot read the requirements {tmp_path}/none.txt: No such file or directory"
    )


def test_a_pyproject_file_gives_its_dependencies(tmp_path: Path) -> None:
    text = '[project]\nname = "m"\nrequires-python = ">=3.8"\ndependencies = ["six>=1", "idna"]\n'
    found = read_requirements(write(tmp_path, "pyproject.toml", text))
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

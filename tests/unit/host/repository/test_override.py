"""Parameters of a load request: their checks, and files in a private folder."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from host.errors import ErrorCode, HostError
from host.inference.request import Parameter
from host.repository.override import ModelFiles, Override, UploadedDirectories, parse_override


def complaint(parameters: dict[str, Parameter | bytes]) -> str:
    with pytest.raises(HostError) as caught:
        parse_override(parameters)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_a_load_without_parameters_overrides_nothing() -> None:
    assert parse_override({}) is None


def test_paths_of_files_are_taken_in_their_shortest_form() -> None:
    files: dict[str, Parameter | bytes] = {
        "file:1/model.py": b"a",
        "file:1/../2/./model.py": b"b",
        "file:..a/.b": b"c",
        "config": "{}",
    }
    assert parse_override(files) == Override(
        "{}", {"1/model.py": b"a", "2/model.py": b"b", "..a/.b": b"c"}
    )


@pytest.mark.parametrize(
    ("path", "normalized"),
    [
        ("", "."),
        (".", "."),
        ("..", ".."),
        ("../x", "../x"),
        ("1/../../x", "../x"),
        ("1/..", "."),
        ("/", "."),
        ("/..", ".."),
        ("/../x", "../x"),
        ("//1/../../x", "../x"),
        ("1/a\0b", "1/a\0b"),
    ],
)
def test_a_path_that_is_not_below_the_model_is_refused(path: str, normalized: str) -> None:
    assert complaint({f"file:{path}": b"", "config": "{}"}) == (
        f"Invalid file parameter 'file:{path}' with normalized path '{normalized}' must stay within"
        " model directory."
    )


@pytest.mark.parametrize("path", ["/1/model.py", "//1/model.py", "/1/./x/../model.py"])
def test_a_path_that_starts_with_a_slash_begins_in_the_model(path: str) -> None:
    override = parse_override({f"file:{path}": b"a", "config": "{}"})
    assert override is not None
    assert override.files == {"1/model.py": b"a"}


@pytest.mark.parametrize("paths", [["1", "1/a/b"], ["1/a/b", "1"], ["1/a", "1/a/b"]])
def test_a_file_cannot_be_a_directory_as_well(paths: list[str]) -> None:
    deepest = max(paths, key=len)
    assert complaint({f"file:{path}": b"" for path in paths}) == (
        f"Invalid file parameter 'file:{deepest}', directory has been created as a file"
    )


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"config": 5}, "Config parameter 'config' must have string type for its value"),
        ({"config": b"{}"}, "Config parameter 'config' must have string type for its value"),
        ({"file:1/m": "x"}, "File parameter 'file:1/m' must have bytes type for its value"),
        ({"1/m": b""}, "Unrecognized load parameter '1/m' with type 'BYTES'"),
        ({"other": "x"}, "Unrecognized load parameter 'other' with type 'STRING'"),
        ({"other": True}, "Unrecognized load parameter 'other' with type 'BOOL'"),
        ({"other": 5}, "Unrecognized load parameter 'other' with type 'INT'"),
        ({"file:m": b""}, "Load parameter 'config' must be specified for model file override"),
        ({"file:m": b"", "file:./m": b""}, "Invalid file parameter 'file:./m', 'm' is given twice"),
    ],
)
def test_other_parameters_are_refused(parameters: dict[str, Parameter | bytes], text: str) -> None:
    assert complaint(parameters) == text


def test_uploaded_files_are_private_and_go_with_their_last_user() -> None:
    uploads = UploadedDirectories()
    directory = uploads.write({"1/model.py": b"x = 1\n", "1/a/b": b""})
    assert (directory / "1" / "model.py").read_bytes() == b"x = 1\n"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = ModelFiles(directory, lambda: uploads.remove(directory))
    files.acquire()
    assert not files.release()
    assert files.release()
    files.remove()
    assert not directory.exists()
    left = uploads.write({"x": b""})
    uploads.close()
    assert not left.parent.exists()


def test_files_that_cannot_be_written_leave_nothing() -> None:
    uploads = UploadedDirectories()
    try:
        with pytest.raises(HostError, match="failed to open binary file for write .*File name too"):
            uploads.write({"1/model.py": b"", "n" * 300: b""})
        folder = uploads.write({}).parent
        assert [path.name[:6] for path in folder.iterdir() if path.is_dir()] == ["model-"]
    finally:
        uploads.close()


def test_the_repositorys_own_files_are_never_removed(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path)
    assert not files.release()
    files.remove()
    assert tmp_path.exists()

"""Which directories and files count as a model, a version, and a file of a model."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from host.config.defaults import normalise_config
from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.errors import ErrorCode, HostError
from host.repository.fingerprint import compute_fingerprint
from host.repository.model_directory import (
    ModelDirectory,
    list_versions,
    model_file_path,
    read_labels,
    select_versions,
)
from host.repository.repository import Repository


def config(text: str = "") -> ModelConfig:
    message = parse_pbtxt(f'name: "m" {text}', "config.pbtxt")
    normalise_config(message)
    return message


def error(call: object, *arguments: object) -> tuple[ErrorCode, str]:
    assert callable(call)
    with pytest.raises(HostError) as caught:
        call(*arguments)
    return caught.value.code, caught.value.message


def test_a_repository_is_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    missing = tmp_path / "missing"
    assert error(Repository, []) == (
        ErrorCode.INVALID_ARG,
        "--model-repository must be specified",
    )
    assert error(Repository([tmp_path, file]).check_paths) == (
        ErrorCode.INVALID_ARG,
        "repository path is not a valid directory",
    )
    assert error(Repository([missing]).check_paths) == (
        ErrorCode.INTERNAL,
        f"failed to stat file {missing}",
    )


def test_every_directory_is_a_model_and_links_count(tmp_path: Path) -> None:
    repository, elsewhere = tmp_path / "r", tmp_path / "elsewhere"
    for name in ("b", "a", ".git", "__pycache__"):
        (repository / name).mkdir(parents=True)
    (repository / "file").touch()
    elsewhere.mkdir()
    (repository / "link").symlink_to(elsewhere)
    found = Repository([repository]).scan()
    assert list(found.models) == ["a", "b", "link"]
    assert found.models["link"] == ModelDirectory("link", repository / "link")
    assert found.failures == {}


def test_a_dangling_link_fails_its_whole_repository_only(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    (broken / "a").mkdir(parents=True)
    (broken / "link").symlink_to(tmp_path / "nowhere")
    (whole / "b").mkdir(parents=True)
    found = Repository([broken, whole]).scan()
    message = f"failed to poll model repository '{broken}': failed to stat file {broken}/link"
    assert list(found.models) == ["b"]
    assert list(found.failures) == [str(broken)]
    assert found.failures[str(broken)].message == message
    assert found.warnings == [message]
    assert Repository([broken]).find_model_directory("a") == ModelDirectory("a", broken / "a")


def test_a_repository_that_vanished_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    repository = Repository([tmp_path / "r"])
    (tmp_path / "r").rmdir()
    scan = repository.scan()
    assert (scan.models, list(scan.failures)) == ({}, [str(tmp_path / "r")])
    assert error(repository.find_model_directory, "m") == (
        ErrorCode.INTERNAL,
        f"failed to poll model repository '{tmp_path}/r': failed to stat file {tmp_path}/r",
    )


def test_a_name_in_two_repositories_is_marked(tmp_path: Path) -> None:
    for name in ("r1/m", "r2/m", "r2/n", "r3/m"):
        (tmp_path / name).mkdir(parents=True)
    repository = Repository([tmp_path / "r3", tmp_path / "r2", tmp_path / "r1", tmp_path / "r1"])
    found = repository.scan()
    assert {name: model.duplicated for name, model in found.models.items()} == {
        "m": True,
        "n": False,
    }
    assert found.warnings == ["failed to poll model 'm': not unique across all model repositories"]
    assert error(repository.find_model_directory, "m") == (
        ErrorCode.INTERNAL,
        "failed to poll model 'm': not unique across all model repositories",
    )
    assert repository.find_model_directory("n") == ModelDirectory("n", tmp_path / "r2" / "n")


@pytest.mark.parametrize("name", ["x", "", ".", "..", "a/b", "a/", "/", ".git", "file", "a\0"])
def test_a_folder_that_is_no_model_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "r" / "a" / "b").mkdir(parents=True)
    (tmp_path / "r" / ".git").mkdir()
    (tmp_path / "r" / "file").touch()
    assert error(Repository([tmp_path / "r"]).find_model_directory, name) == (
        ErrorCode.INTERNAL,
        f"failed to poll model '{name}': model not found in any model repository.",
    )


def test_versions_are_numbered_directories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = ("warmup", "initial_state", "configs", ".cache", "__pycache__")
    for name in ("10", "2", "0", "01", "00", "1abc", "-3", "assets", *silent):
        (tmp_path / name).mkdir()
    (tmp_path / "1abc" / "model.pt").touch()
    (tmp_path / "-3" / "net.py").touch()
    (tmp_path / "assets" / "vocabulary.txt").touch()
    (tmp_path / "7").touch()
    (tmp_path / "4").symlink_to(tmp_path / "2")
    with caplog.at_level(logging.DEBUG, "pbhost"):
        assert list_versions(tmp_path, "net.py") == [0, 2, 4, 10]
    zeros = "which contains leading zeros in its directory name"
    no_number = "which fails to convert to integral number"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"ignore version directory '-3' {no_number}"),
        ("WARNING", f"ignore version directory '00' {zeros}"),
        ("WARNING", f"ignore version directory '01' {zeros}"),
        ("WARNING", f"ignore version directory '1abc' {no_number}"),
        ("DEBUG", f"ignore version directory 'assets' {no_number}"),
    ]


def test_versions_of_a_directory_that_vanished_cannot_be_told(tmp_path: Path) -> None:
    missing = tmp_path / "m"
    assert error(list_versions, missing) == (ErrorCode.INTERNAL, f"failed to stat file {missing}")


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("", [10]),
        ("version_policy { latest { num_versions: 2 } }", [2, 10]),
        ("version_policy { latest { num_versions: 9 } }", [1, 2, 10]),
        ("version_policy { all {} }", [1, 2, 10]),
        ("version_policy {}", [1, 2, 10]),
        ("version_policy { specific { versions: [10, 1, 1] } }", [1, 10]),
    ],
)
def test_the_policy_selects_versions(policy: str, chosen: list[int]) -> None:
    assert select_versions(config(policy), [10, 1, 2]) == chosen


@pytest.mark.parametrize(
    ("policy", "available", "there"),
    [
        ("", [], "it has no version folder, such as '1' (its name must be a number)"),
        ("version_policy { latest {} }", [1], "its versions are 1"),
        (
            "version_policy { all {} }",
            [],
            "it has no version folder, such as '1' (its name must be a number)",
        ),
        ("version_policy { specific { versions: 2 } }", [3, 1], "its versions are 1, 3"),
    ],
)
def test_a_model_without_a_version_is_refused(
    policy: str, available: list[int], there: str
) -> None:
    assert error(select_versions, config(policy), available) == (
        ErrorCode.INVALID_ARG,
        "at least one version must be available under the version policy of model 'm': " + there,
    )


def test_a_specific_version_that_is_missing_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = config("version_policy { specific { versions: [1, 3] } }")
    assert select_versions(wanted, [1, 2]) == [1]
    assert caplog.messages == [
        "version 3 is specified for model 'm', but the version directory is not present"
    ]


def test_the_stamp_tells_any_change_below(tmp_path: Path) -> None:
    version = tmp_path / "1"
    version.mkdir()
    file = version / "model.py"
    file.touch()
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    stamps = [compute_fingerprint(tmp_path)]
    later = file.stat().st_mtime_ns + 10**12
    os.utime(file, ns=(later, later))
    stamps.append(compute_fingerprint(tmp_path))
    (version / "other.py").touch()
    stamps.append(compute_fingerprint(tmp_path))
    file.unlink()
    stamps.append(compute_fingerprint(tmp_path))
    (tmp_path / "2").mkdir()
    stamps.append(compute_fingerprint(tmp_path))
    assert len(set(stamps)) == len(stamps)


def test_a_directory_without_a_listing_has_no_stamp(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        compute_fingerprint(tmp_path / "gone")
    assert caught.value.message == (
        f"failed to read directory {tmp_path}/gone: No such file or directory"
    )


@pytest.mark.parametrize(
    "leftover",
    [
        "__pycache__/model.cpython-312.pyc",
        ".git/HEAD",
        ".model.py.swp",
        "4913",
        "model.py~",
        "#model.py#",
        ".#model.py",
        "model.py___jb_tmp___",
        ".goutputstream-A1B2C3",
        ".nfs000000000001",
    ],
)
def test_the_stamp_ignores_what_running_and_editing_leaves(tmp_path: Path, leftover: str) -> None:
    (tmp_path / "1").mkdir()
    before = compute_fingerprint(tmp_path)
    path = tmp_path / "1" / leftover
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert compute_fingerprint(tmp_path) == before


@pytest.mark.parametrize("name", ["model.pyc", ".env", "weights.tmp", "#1", "4914"])
def test_the_stamp_counts_what_may_belong_to_a_model(tmp_path: Path, name: str) -> None:
    before = compute_fingerprint(tmp_path)
    (tmp_path / name).touch()
    assert compute_fingerprint(tmp_path) != before


def test_a_model_file_stays_with_its_model(tmp_path: Path) -> None:
    model, outside = tmp_path / "m", tmp_path / "outside"
    for directory in (model / "1", model / "common", outside):
        directory.mkdir(parents=True)

    def file(name: str, version: int = 1) -> Path:
        return model_file_path(model, version, config(f'default_model_filename: "{name}"'))

    assert file("model.py") == model / "1" / "model.py"
    assert file("../common/model.py").resolve() == model / "common" / "model.py"
    escape = "../../outside/model.py"
    assert error(file, escape) == (
        ErrorCode.INVALID_ARG,
        f"model file path '{outside}/model.py' in model 'm' is outside model directory",
    )
    assert error(file, "/etc/passwd")[0] is ErrorCode.INVALID_ARG
    (model / "1" / "link.py").symlink_to(outside / "model.py")
    assert file("link.py").resolve() == outside / "model.py"
    (model / "2").symlink_to(outside)
    assert file("model.py", 2).resolve() == outside / "model.py"


def test_a_linked_model_directory_is_where_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real" / "1").mkdir(parents=True)
    (tmp_path / "m").symlink_to(tmp_path / "real")
    name = config('default_model_filename: "model.py"')
    assert model_file_path(tmp_path / "m", 1, name) == tmp_path / "m" / "1" / "model.py"


def labelled(path: str) -> ModelConfig:
    return config(f'output {{ name: "o" label_filename: "{path}" }} output {{ name: "p" }}')


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("cat\ndog\n", ["cat", "dog"]),
        ("cat\r\ndog", ["cat", "dog"]),
        ("cat\n\ndog", ["cat", "", "dog"]),
        ("one\u2028line", ["one\u2028line"]),
        ("", []),
    ],
)
def test_a_label_is_a_line(tmp_path: Path, text: str, lines: list[str]) -> None:
    (tmp_path / "labels.txt").write_bytes(text.encode())
    assert read_labels(tmp_path, labelled("labels.txt")) == {"o": lines}


def test_label_files_stay_in_their_model(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (tmp_path / "labels.txt").touch()
    (model / "link.txt").symlink_to(tmp_path / "labels.txt")
    for path in ("../labels.txt", "link.txt"):
        assert error(read_labels, model, labelled(path)) == (
            ErrorCode.UNSUPPORTED,
            (
                f"label file path '{model}/{path}' for output 'o' in model 'm' is outside model "
                "directory"
            ),
        )


def test_a_label_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert error(read_labels, tmp_path, labelled("labels.txt")) == (
        ErrorCode.INTERNAL,
        f"failed to open text file for read {tmp_path}/labels.txt: No such file or directory",
    )
    (tmp_path / "labels.txt").write_bytes(b"\xff")
    assert error(read_labels, tmp_path, labelled("labels.txt"))[0] is ErrorCode.INTERNAL

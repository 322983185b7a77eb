"""Unpacking archives: files are written only below the target folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.environments import archive as unpacker
from host.environments.archive import MAX_BYTES, MAX_MEMBERS, ArchiveExtractor, BadArchive


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"x") -> bytes:
    """One member's bytes in a tar file."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.mode = 0o644
    info.mtime = 1_500_000_000
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    whole = info.tobuf(tarfile.GNU_FORMAT)
    return whole + (data + b"\0" * (-len(data) % 512) if info.size else b"")


def folder(name: str) -> bytes:
    return member(name, tarfile.DIRTYPE)


def symlink(name: str, target: str) -> bytes:
    return member(name, tarfile.SYMTYPE, target)


def hardlink(name: str, target: str) -> bytes:
    return member(name, tarfile.LNKTYPE, target)


class Place:
    """A folder to unpack into, beside a folder that must not change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inside = path / "inside"
        self.outside = path / "outside"
        self.inside.mkdir()
        self.outside.mkdir(mode=0o755)
        (self.outside / "a").write_text("precious")

    def unpack(
        self,
        *members: bytes,
        end: bytes = b"\0" * 1024,
        most_bytes: int = MAX_BYTES,
        most_members: int = MAX_MEMBERS,
    ) -> None:
        archive = self.path / "archive.tar"
        archive.write_bytes(b"".join(members) + end)
        ArchiveExtractor(str(self.inside), most_bytes, most_members).extract(str(archive))

    def refusal(
        self, *members: bytes, most_bytes: int = MAX_BYTES, most_members: int = MAX_MEMBERS
    ) -> str:
        with pytest.raises(BadArchive) as caught:
            self.unpack(*members, most_bytes=most_bytes, most_members=most_members)
        assert self.untouched()
        return str(caught.value)

    def untouched(self) -> bool:
        whole = {path.name: path.read_text() for path in self.outside.iterdir()}
        mode = (self.outside / "a").stat().st_mode & 0o777, (self.outside / "a").stat().st_nlink
        return whole == {"a": "precious"} and mode == (0o644, 1)

    def found(self) -> list[str]:
        return sorted(str(path.relative_to(self.inside)) for path in self.inside.rglob("*"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_an_environment_is_unpacked_completely(
    place: Place, tmp_path: Path, mode: Literal["w", "w:gz", "w:bz2", "w:xz"]
) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "python3").write_text("#!/bin/sh\n")
    (source / "bin" / "python3").chmod(0o775)
    (source / "bin" / "python").symlink_to("python3")
    (source / "lib").mkdir(mode=0o555)
    (source / "empty").write_bytes(b"")
    os.link(source / "empty", source / "linked")
    os.utime(source / "empty", (1_600_000_000, 1_600_000_000))
    with tarfile.open(tmp_path / "packed", mode) as archive:
        archive.add(source, ".")
    ArchiveExtractor(str(place.inside)).extract(str(tmp_path / "packed"))
    assert place.found() == [
        "bin", "bin/python", "bin/python3", "empty", "lib", "linked",
    ]  # fmt: skip
    assert os.access(place.inside / "bin" / "python", os.X_OK)
    assert os.readlink(place.inside / "bin" / "python") == "python3"
    # Compiled modules contain the modification time of their source.
    assert (place.inside / "empty").stat().st_mtime == 1_600_000_000
    assert (place.inside / "lib").stat().st_mode & 0o700 == 0o700, "it could not be removed"
    assert (place.inside / "linked").stat().st_nlink == 2


def test_a_symbolic_link_may_point_to_an_interpreter_elsewhere(place: Place) -> None:
    place.unpack(symlink("bin/python", "/usr/bin/python3"))
    assert os.readlink(place.inside / "bin" / "python") == "/usr/bin/python3"


def test_a_later_member_replaces_an_earlier_one(place: Place) -> None:
    place.unpack(member("a", data=b"1"), member("a", data=b"2"))
    assert (place.inside / "a").read_text() == "2"


@pytest.mark.parametrize("name", ["../a", "x/../../outside/a", "..", "x/.."])
def test_a_name_with_dots_is_refused(place: Place, name: str) -> None:
    assert place.refusal(member(name)) == f"Path contains '..': {name}"
    assert place.refusal(folder(name)).startswith("Path contains '..'")


def test_an_absolute_name_is_refused(place: Place) -> None:
    name = f"{place.outside}/a"
    assert place.refusal(member(name)) == f"Path is absolute: {name}"
    assert place.refusal(hardlink("b", name)) == f"Path is absolute: {name}"


def test_nothing_is_written_through_a_link(place: Place) -> None:
    link = symlink("way", "../outside")
    for through in (member("way/a"), folder("way"), folder("way/new"), symlink("way/a", "b")):
        for path in place.inside.iterdir():
            path.unlink()
        assert place.refusal(link, through) == "Cannot extract through symlink way"


def test_a_file_replaces_a_link_and_does_not_follow_it(place: Place) -> None:
    place.unpack(symlink("a", "../outside/a"), member("a", data=b"new"))
    assert place.untouched()
    assert (place.inside / "a").read_text() == "new"


def test_a_hard_link_to_a_symbolic_link_is_a_symbolic_link(place: Place) -> None:
    place.unpack(symlink("one", "../outside/a"), hardlink("two", "one"), member("two", data=b"new"))
    assert place.untouched()


@pytest.mark.parametrize("target", ["../outside/a", "missing", "x/../../outside/a"])
def test_a_hard_link_must_point_to_another_member(place: Place, target: str) -> None:
    text = place.refusal(hardlink("b", target))
    assert text in (
        f"Path contains '..': {target}",
        "'b' links to 'missing', which is not in the archive",
    )


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_are_refused(place: Place, kind: bytes) -> None:
    assert place.refusal(member("dev", kind)) == "'dev' is a device or a pipe"


def test_a_file_cannot_be_a_folder_too(place: Place) -> None:
    assert place.refusal(member("a"), member("a/b")) == "'a' is a file and a folder"
    assert place.refusal(folder("c"), member("c")) == "'c' is a folder and a file"
    assert place.refusal(member("./")) == "'./' is not a valid file name"


def test_an_archive_over_the_limits_is_refused_before_it_is_written(place: Place) -> None:
    text = place.refusal(
        member("a", data=b"123"), member("b", data=b"123"), most_bytes=5, most_members=9
    )
    assert text == "it has more than 5 bytes in 9 files"
    assert place.found() == ["a"]
    text = place.refusal(folder("x"), folder("y"), folder("z"), most_bytes=5, most_members=2)
    assert text == "it has more than 5 bytes in 2 files"


def test_a_truncated_archive_is_refused(place: Place) -> None:
    with pytest.raises(BadArchive, match="it is not a readable tar file: unexpected end of data"):
        place.unpack(member("a", data=b"x" * 5000)[:-2000], end=b"")


def test_a_file_that_is_not_an_archive_is_refused(place: Place) -> None:
    with pytest.raises(BadArchive, match="it is not a readable tar file: "):
        place.unpack(b"model weights" * 1000)


NAMES = st.sampled_from(["a", "b", "a/b", "a/a", "b/a/b", "./a", "a/", "../outside/a", ".", "a/.."])
TARGETS = st.sampled_from(["../outside", "../outside/a", "a", "b", ".", "..", "/", "../../outside"])
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
MEMBERS = st.lists(st.builds(member, NAMES, KINDS, TARGETS), max_size=8)


@given(MEMBERS)
@settings(max_examples=300, deadline=None)
def test_no_archive_can_write_outside_its_folder(members: list[bytes]) -> None:
    with TemporaryDirectory() as path:
        place = Place(Path(path))
        try:
            place.unpack(*members)
        except (BadArchive, OSError):
            pass
        assert place.untouched()
        assert sorted(entry.name for entry in place.path.iterdir()) == [
            "archive.tar", "inside", "outside",
        ]  # fmt: skip


def test_the_program_prints_the_error_in_one_line(place: Place, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    bad.write_bytes(member("../a") + b"\0" * 1024)
    done = subprocess.run(
        [sys.executable, "-I", unpacker.__file__, bad, place.inside], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "Path contains '..': ../a\n")
    missing = [sys.executable, "-I", unpacker.__file__, str(tmp_path / "none"), str(place.inside)]
    done = subprocess.run(missing, capture_output=True, text=True)
    assert done.stdout == f"No such file or directory: {tmp_path}/none\n"

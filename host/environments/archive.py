"""Unpacks the archive of an environment; a program of its own, so that the server goes on.

`archive.py ARCHIVE FOLDER` prints what is wrong and exits with 1 if the archive cannot be trusted
or read. It imports nothing of this project: it is run by its path.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Iterator

MAX_BYTES = 128 << 30
"""What the files of one archive may take together."""
MAX_MEMBERS = 4_000_000

_DIRECTORY, _FILE, _LINK = "folder", "file", "link"


class BadArchive(Exception):
    """It would write outside its folder, holds what no environment has, or cannot be read."""


class ArchiveExtractor:
    """Puts members below `folder`, which must exist and be empty.

    Nothing is written but through folders that it has made itself, and every name is made anew.
    A symbolic link may lead anywhere (an interpreter is often one), but is never followed.
    """

    def __init__(
        self, folder: str, most_bytes: int = MAX_BYTES, most_members: int = MAX_MEMBERS
    ) -> None:
        self._folder = folder
        self._bytes_left = most_bytes
        self._members_left = most_members
        self._limits = f"{most_bytes} bytes in {most_members} files"
        self._kinds: dict[str, str] = {"": _DIRECTORY}

    def extract(self, path: str) -> None:
        """Unpack a tar file, compressed by gzip, bzip2, xz or not. Raises BadArchive or OSError."""
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    self.extract_member(archive, member)
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise BadArchive(f"it is no readable tar file: {error}") from error

    def extract_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpack one member. Raises BadArchive."""
        self._check_limits(member)
        name = _checked_name(member.name)
        if member.isdir():
            self._make_directories(name)
            return
        if not name:
            raise BadArchive(f"'{member.name}' is no name of a file")
        parent, _, _ = name.rpartition("/")
        self._make_directories(parent)
        target = os.path.join(self._folder, name)
        self._remove_existing(name, target)
        if member.issym():
            os.symlink(member.linkname, target)
            self._kinds[name] = _LINK
        elif member.islnk():
            os.link(self._link_target(member), target, follow_symlinks=False)
            self._kinds[name] = self._kinds[_checked_name(member.linkname)]
        elif member.isreg():
            self._write_file(archive, member, target)
            self._kinds[name] = _FILE
        else:
            raise BadArchive(f"'{member.name}' is a device or a pipe")

    def _check_limits(self, member: tarfile.TarInfo) -> None:
        self._members_left -= 1
        self._bytes_left -= max(0, member.size) if member.isreg() else 0
        if self._members_left < 0 or self._bytes_left < 0:
            raise BadArchive(f"it holds more than {self._limits}")

    def _make_directories(self, name: str) -> None:
        """Make a folder and those above it, unless they have been made."""
        for path in _ancestors(name):
            kind = self._kinds.get(path)
            if kind is None:
                os.mkdir(os.path.join(self._folder, path), 0o755)
                self._kinds[path] = _DIRECTORY
            elif kind == _LINK:
                raise BadArchive(f"Cannot extract through symlink {path}")
            elif kind == _FILE:
                raise BadArchive(f"'{path}' is a file and a folder")

    def _remove_existing(self, name: str, target: str) -> None:
        """A later member of the same name replaces the earlier one."""
        kind = self._kinds.get(name)
        if kind == _DIRECTORY:
            raise BadArchive(f"'{name}' is a folder and a file")
        if kind is not None:
            os.unlink(target)

    def _link_target(self, member: tarfile.TarInfo) -> str:
        name = _checked_name(member.linkname)
        if self._kinds.get(name) not in (_FILE, _LINK):
            raise BadArchive(f"'{member.name}' links to '{member.linkname}', which it lacks")
        return os.path.join(self._folder, name)

    def _write_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
        source = archive.extractfile(member)
        assert source is not None  # as of any regular file
        mode = 0o755 if member.mode & 0o111 else 0o644
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with source, open(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            if file.tell() != member.size:
                raise BadArchive(f"'{member.name}' is cut off")
        os.utime(target, (member.mtime, member.mtime))


def _checked_name(name: str) -> str:
    """A member's name as folders below one another. Raises BadArchive, in libarchive's words."""
    if name.startswith("/"):
        raise BadArchive(f"Path is absolute: {name}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadArchive(f"Path contains '..': {name}")
    return "/".join(parts)


def _ancestors(name: str) -> Iterator[str]:
    """`a`, `a/b`, `a/b/c`; nothing for the top."""
    parts = name.split("/") if name else []
    for count in range(1, len(parts) + 1):
        yield "/".join(parts[:count])


def main(archive: str, folder: str) -> int:
    """Unpack; the exit status."""
    try:
        ArchiveExtractor(folder).extract(archive)
    except BadArchive as error:
        sys.stdout.write(f"{error}\n")
    except OSError as error:
        sys.stdout.write(f"{error.strerror}: {error.filename or archive}\n")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

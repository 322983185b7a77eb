"""A program that unpacks the archive of an environment: `archive.py ARCHIVE FOLDER`.

If the archive is unsafe or cannot be read, it prints the reason and exits with status 1. It is a
separate process, so that the server does not wait for it, and is started by its path, so it imports
no other module of this project.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Iterator

MAX_BYTES = 128 << 30
"""The maximum size of all files of an archive, in bytes."""
MAX_MEMBERS = 4_000_000

_DIRECTORY, _FILE, _LINK = "folder", "file", "link"


class BadArchive(Exception):
    """The archive cannot be read, would write outside its folder, or has devices or pipes."""


class ArchiveExtractor:
    """Unpacks archives into `folder`, which must exist and be empty.

    Files are written only into folders that the extractor has created. Symbolic links may point
    anywhere (a venv's interpreter is often a link), but the extractor never follows them.
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
        """Unpacks a tar file (plain, gzip, bzip2 or xz). Raises BadArchive or OSError."""
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    self.extract_member(archive, member)
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise BadArchive(f"it is not a readable tar file: {error}") from error

    def extract_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpacks one member. Raises BadArchive."""
        self._check_limits(member)
        name = _checked_name(member.name)
        if member.isdir():
            self._make_directories(name)
            return
        if not name:
            raise BadArchive(f"'{member.name}' is not a valid file name")
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
            raise BadArchive(f"it has more than {self._limits}")

    def _make_directories(self, name: str) -> None:
        """Creates a folder and its parents, unless they exist."""
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
        """Removes an earlier member of the same name, which this one replaces."""
        kind = self._kinds.get(name)
        if kind == _DIRECTORY:
            raise BadArchive(f"'{name}' is a folder and a file")
        if kind is not None:
            os.unlink(target)

    def _link_target(self, member: tarfile.TarInfo) -> str:
        name = _checked_name(member.linkname)
        if self._kinds.get(name) not in (_FILE, _LINK):
            raise BadArchive(
                f"'{member.name}' links to '{member.linkname}', which is not in the archive"
            )
        return os.path.join(self._folder, name)

    def _write_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
        source = archive.extractfile(member)
        assert source is not None  # because it is a regular file
        mode = 0o755 if member.mode & 0o111 else 0o644
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with source, open(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            if file.tell() != member.size:
                raise BadArchive(f"'{member.name}' is truncated")
        os.utime(target, (member.mtime, member.mtime))


def _checked_name(name: str) -> str:
    """Normalises a member's path. Raises BadArchive with the texts of libarchive, as in Triton."""
    if name.startswith("/"):
        raise BadArchive(f"Path is absolute: {name}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadArchive(f"Path contains '..': {name}")
    return "/".join(parts)


def _ancestors(name: str) -> Iterator[str]:
    """Yields `a`, `a/b` and `a/b/c` for `a/b/c`; nothing for an empty name."""
    parts = name.split("/") if name else []
    for count in range(1, len(parts) + 1):
        yield "/".join(parts[:count])


def main(archive: str, folder: str) -> int:
    """Unpacks the archive and returns the exit status."""
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

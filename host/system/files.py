"""Reads regular files, locks files, and creates private directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

NOT_REGULAR = "it is not a regular file"


def read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError, at once for a pipe, a socket or a device. Blocks."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raises OSError if the path is a pipe, a socket or a device. Blocks."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # it does not exist, or no file can have this name
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


_PREFIX = "pbhost-"
_LOCK = "lock"


class PrivateDirectory:
    """A directory that only this user can enter, until this object is closed.

    It holds a locked file: a directory whose lock is free no longer has an owner.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
        # Renamed once it is locked, so that other processes never see it unlocked.
        fresh = self.path / f"{_LOCK}.new"
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        """Removes the directory and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned() -> None:
    """Removes this user's directories whose servers ended without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, gone meanwhile, or not made by pbhost
            if folder.stat().st_uid == os.getuid() and _is_abandoned(folder / _LOCK):
                shutil.rmtree(folder)


def _is_abandoned(lock: Path) -> bool:
    """Whether no process holds the lock. Raises OSError, also if there is no lock file (yet)."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)


def try_lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file unless another process holds the lock (flock(2)); whether it did."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

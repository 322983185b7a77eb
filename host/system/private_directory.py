"""A private folder below the system's temporary one; what a killed server left is swept away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pbhost-"
_LOCK = "lock"


class PrivateDirectory:
    """A folder that only this user can enter, for as long as this object is not closed.

    It holds a locked file: a folder whose lock is free belongs to nobody any more.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
        fresh = self.path / f"{_LOCK}.new"  # renamed once it is locked: nobody sees it unlocked
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned() -> None:
    """Remove this user's folders whose servers have ended without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, gone meanwhile, or not made by us
            if folder.stat().st_uid == os.getuid() and _is_abandoned(folder / _LOCK):
                shutil.rmtree(folder)


def _is_abandoned(lock: Path) -> bool:
    """Whether no process holds the lock. Raises OSError, also if there is no lock file (yet)."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True

"""Reads files of a repository without ever blocking on a pipe or a device."""

from __future__ import annotations

import errno
import os
import stat
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

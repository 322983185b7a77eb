"""Files of a repository as the host reads them: none that would keep whoever reads it waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

NOT_REGULAR = "it is not a regular file"


def read_file(path: Path) -> bytes:
    """What is in it. Raises OSError, at once for a pipe, a socket or a device. Blocks."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raises OSError if a pipe, a socket or a device is there. Blocks."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # it is not there, or has a name that no file can have
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))

"""Control groups for tests, where this process may make some."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_until

_MOUNT = Path("/sys/fs/cgroup")

_JOIN = """
import os, sys
with open(sys.argv[1], "w") as group:
    group.write(str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _own_group(controller: str) -> Path:
    """The folder of this process's control group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _MOUNT / controller / path.lstrip("/")
        if not controllers and (_MOUNT / "cgroup.controllers").exists():
            return _MOUNT / path.lstrip("/")
    pytest.skip(f"there is no control group for {controller}")


@contextmanager
def new_control_group(controller: str) -> Iterator[Path]:
    """The folder of a new control group; skips the test if none can be made."""
    folder = _own_group(controller) / f"pbhost-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        if not any(folder.glob(f"{controller}.*")):
            pytest.skip(f"a new control group has no {controller} controller")
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the group to be empty")
        folder.rmdir()


def joining(folder: Path) -> list[str]:
    """The beginning of a command that runs the rest in the group."""
    return [sys.executable, "-c", _JOIN, str(folder / "cgroup.procs")]

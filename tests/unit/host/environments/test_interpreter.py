"""Environments without the packages that the server can lend."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from host.environments.environment import Environment, StubSources
from host.environments.interpreter import check_interpreter
from host.errors import ErrorCode, HostError
from tests.conftest import DEADLINE
from tests.pythons import empty_venv, site_packages


def test_links_to_packages_are_made_at_the_next_load_if_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = empty_venv(tmp_path / "env")
    for name in ("numpy", "numpy.libs"):
        (site_packages(env) / name).symlink_to(Path(np.__file__).parents[1] / name)
    (tmp_path / "sources").mkdir()
    environment = Environment(env, StubSources(tmp_path / "sources"))
    symlink_to = Path.symlink_to

    def link_or_fail(self: Path, target: Path) -> None:
        if self.name == "msgspec":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        symlink_to(self, target)

    with monkeypatch.context() as full_disk, pytest.raises(HostError) as caught:
        full_disk.setattr(Path, "symlink_to", link_or_fail)
        asyncio.run(check_interpreter(environment, DEADLINE, "{packages}"))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"The Python environment {env} lacks pyzmq, msgspec, and links to those of the server"
        " cannot be made: [Errno 28] No space left on device"
    )
    assert sorted(os.listdir(tmp_path)) == ["env", "sources"]
    lent = asyncio.run(check_interpreter(environment, DEADLINE, "{packages}"))
    assert (lent.sources.entry.parents[1] / "msgspec").is_dir()

"""Processes that cannot be started, or not be watched, leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import psutil
import pytest

from host.environments.environment import Environment, StubSources
from host.instances.launchers import ForkLauncher, SpawnLauncher, TerminalLauncher
from host.instances.stub_process import Launcher, StubLaunch
from stub.wire.spawn import SpawnArguments
from tests.descriptors import descriptors

SPAWN = SpawnArguments(
    endpoint="ipc:///nowhere",
    token="t",
    process_title="",
    lifeline_fd=0,
    rings_fd=0,
    work_event_fd=0,
    host_event_fd=0,
    bls_event_fd=0,
    arena=1,
    arena_fd=0,
    arena_limit=4096,
    host_arena_fd=0,
    host_arena_limit=4096,
)


def ignore_output(line: str, error: bool) -> None:
    pass


def ignore_exit(code: int) -> None:
    pass


async def launch_error(launcher: Launcher, environment: Environment | None = None) -> OSError:
    """The error of a launch, which must leave no descriptor open and no child."""
    lifeline_read, lifeline = os.pipe()
    process = psutil.Process()
    try:
        await asyncio.get_running_loop().run_in_executor(None, int)  # what a loop opens on its way
        before, children = descriptors(), set(process.children())
        with pytest.raises(OSError) as caught:
            await launcher.launch(
                StubLaunch(SPAWN, lifeline, ignore_output, ignore_exit, environment)
            )
        assert not descriptors() - before
        assert not set(process.children()) - children
        os.fstat(lifeline)  # is its owner's
    finally:
        await launcher.close()
        os.close(lifeline)
        os.close(lifeline_read)
    return caught.value


@pytest.mark.parametrize("kind", [SpawnLauncher, TerminalLauncher])
def test_a_process_that_cannot_be_watched_is_ended(
    kind: type[SpawnLauncher] | type[TerminalLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_room)
    assert asyncio.run(launch_error(kind())).errno == errno.EMFILE


@pytest.mark.parametrize("kind", [SpawnLauncher, ForkLauncher])
def test_missing_environment_is_an_error(
    kind: type[SpawnLauncher] | type[ForkLauncher], tmp_path: Path
) -> None:
    (tmp_path / "sources").mkdir()

    async def launch() -> OSError:
        environment = Environment(tmp_path / "gone", StubSources(tmp_path / "sources"))
        return await launch_error(kind(), environment)

    error = asyncio.run(launch())
    assert error.errno == errno.ENOENT
    assert error.filename == str(tmp_path / "gone/bin/python")

"""The warden as its host has it: started when needed, replaced, and let go of."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from host.instances import warden as module
from host.instances.warden import Warden
from tests.conftest import DEADLINE


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads its group."""
    with subprocess.Popen(["sleep", "100000"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_group_is_ended_when_its_end_is_told(group: subprocess.Popen[bytes]) -> None:
    warden = Warden()
    warden.watch(group.pid)
    warden.end(group.pid)
    assert group.wait(DEADLINE) == -signal.SIGTERM
    asyncio.run(warden.close())


def test_without_a_stub_there_is_no_warden() -> None:
    before = set(psutil.Process().children())
    asyncio.run(Warden().close())
    assert not set(psutil.Process().children()) - before


def test_groups_are_known_to_the_one_that_takes_its_place(
    group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_SECONDS", DEADLINE)
    warden = Warden()
    warden.watch(group.pid)
    first = warden._pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    with subprocess.Popen(["sleep", "100000"], start_new_session=True) as other:
        warden.watch(other.pid)
        assert warden._pid != first
        asyncio.run(warden.close())  # which both groups have not lived to see
        assert [process.wait(DEADLINE) for process in (group, other)] == [-signal.SIGTERM] * 2


def test_one_that_stands_still_holds_up_no_end(
    group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_SECONDS", 0.1)
    warden = Warden()
    warden.watch(group.pid)
    os.kill(warden._pid, signal.SIGSTOP)
    asyncio.run(asyncio.wait_for(warden.close(), DEADLINE))
    assert not psutil.pid_exists(warden._pid)

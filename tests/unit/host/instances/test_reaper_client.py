"""The process reaper: kills what models leave behind, even if the host is killed."""

from __future__ import annotations

import asyncio
import functools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import psutil
import pytest

from host.instances import reaper_client as module
from host.instances.reaper_client import ProcessReaper
from tests.conftest import DEADLINE, wait_until
from tests.descriptors import descriptors

P = ParamSpec("P")


Lead = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def lead() -> Iterator[Lead]:
    """Starts programs that each lead their group."""
    started: list[subprocess.Popen[bytes]] = []

    def lead(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command or ["sleep", "100000"], start_new_session=True))
        return started[-1]

    yield lead
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def group(lead: Lead) -> subprocess.Popen[bytes]:
    return lead()


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def until(condition: Callable[[], bool], what: str) -> None:
    """Lets the loop run until it holds."""
    await asyncio.to_thread(wait_until, condition, what)


def kill(pid: int) -> None:
    """Returns when it is dead, and not yet reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@on_a_loop
async def test_group_is_killed_when_its_stub_exits(group: subprocess.Popen[bytes]) -> None:
    reaper = ProcessReaper()
    reaper.watch_group(group.pid)
    reaper.kill_group(group.pid)
    assert await asyncio.to_thread(group.wait, DEADLINE) == -signal.SIGTERM
    await until(lambda: group.pid not in reaper._unconfirmed, "the end to be confirmed")
    await reaper.close()


@on_a_loop
async def test_empty_group_is_confirmed_at_once(lead: Lead) -> None:
    reaper = ProcessReaper()
    process = lead("true")
    process.wait(DEADLINE)
    reaper.watch_group(process.pid)
    reaper.kill_group(process.pid)
    await until(lambda: process.pid not in reaper._unconfirmed, "the end to be confirmed")
    await reaper.close()


@on_a_loop
async def test_no_reaper_is_started_without_a_stub() -> None:
    before = set(psutil.Process().children())
    await ProcessReaper().close()
    assert not set(psutil.Process().children()) - before


@on_a_loop
async def test_replacement_reaper_knows_all_groups(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_TIMEOUT", DEADLINE)
    reaper = ProcessReaper()
    groups = [lead(), lead()]
    reaper.watch_group(groups[0].pid)
    first = reaper._pid
    kill(first)
    reaper.watch_group(groups[1].pid)
    assert reaper._pid != first
    await reaper.close()  # which both groups have not lived to see
    assert [process.wait(DEADLINE) for process in groups] == [-signal.SIGTERM] * 2


@on_a_loop
async def test_kill_missed_by_a_dying_reaper_is_sent_to_its_replacement(
    group: subprocess.Popen[bytes],
) -> None:
    reaper = ProcessReaper()
    reaper.watch_group(group.pid)
    first = reaper._pid
    os.kill(first, signal.SIGSTOP)
    reaper.kill_group(group.pid)  # without an error: it is written to a socket that is open
    os.kill(first, signal.SIGKILL)
    assert await asyncio.to_thread(group.wait, DEADLINE) == -signal.SIGTERM
    await until(lambda: group.pid not in reaper._unconfirmed, "the end to be confirmed")
    assert reaper._pid != first
    await reaper.close()


@on_a_loop
async def test_kill_missed_by_a_dying_reaper_is_repeated_on_close(
    group: subprocess.Popen[bytes],
) -> None:
    reaper = ProcessReaper()
    reaper.watch_group(group.pid)
    os.kill(reaper._pid, signal.SIGSTOP)
    reaper.kill_group(group.pid)
    os.kill(reaper._pid, signal.SIGKILL)
    await reaper.close()
    assert group.wait(DEADLINE) == -signal.SIGTERM


def stop(pid: int) -> None:
    """Returns when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stop")


@on_a_loop
async def test_reaper_reads_everything_though_its_last_confirmation_is_unread(
    lead: Lead, group: subprocess.Popen[bytes]
) -> None:
    reaper = ProcessReaper()
    ended = lead("true")
    ended.wait(DEADLINE)
    reaper.kill_group(ended.pid)
    sock = reaper._socket
    assert sock is not None
    assert select.select([sock], [], [], DEADLINE)[0]
    stop(reaper._pid)
    reaper.watch_group(group.pid)
    await reaper.close()
    assert group.wait(DEADLINE) == -signal.SIGTERM


KILLED_HOST = """
import asyncio, os, signal, sys
from host.instances.reaper_client import ProcessReaper

async def main():
    reaper = ProcessReaper()
    reaper.watch_group(int(sys.argv[1]))
    print(reaper._pid, flush=True)
    sys.stdin.readline()
    for group in sys.argv[2:]:
        reaper.watch_group(int(group))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_reaper_reads_everything_that_a_killed_host_has_sent(lead: Lead) -> None:
    groups = [lead(), lead(), lead()]
    host = subprocess.Popen(
        [sys.executable, "-c", KILLED_HOST, *(str(group.pid) for group in groups)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert host.stdout is not None
    reaper = int(host.stdout.readline())
    wait_until(
        lambda: any("pidfd" in what for _, what in descriptors(reaper)), "it to watch the host"
    )
    stop(reaper)
    host.communicate(b"\n", timeout=DEADLINE)
    os.kill(reaper, signal.SIGCONT)
    assert [group.wait(DEADLINE) for group in groups] == [-signal.SIGTERM] * 3


@on_a_loop
async def test_dead_reaper_is_replaced_at_once(
    group: subprocess.Popen[bytes],
) -> None:
    reaper = ProcessReaper()
    reaper.watch_group(group.pid)
    first = reaper._pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: reaper._pid != first, "another one")
    await reaper.close()
    assert group.wait(DEADLINE) == -signal.SIGTERM


@on_a_loop
async def test_reapers_that_exit_at_once_are_replaced_a_limited_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began = tmp_path / "began"
    entry = tmp_path / "process_reaper.py"
    entry.write_text(f"open({str(began)!r}, 'a').write('x')\nraise SystemExit(1)\n")
    monkeypatch.setattr(module, "_ENTRY", str(entry))
    reaper = ProcessReaper()
    reaper.watch_group(os.getpid())
    await until(lambda: began.exists() and began.read_text() == "xxx", "three of them")
    await until(lambda: reaper._socket is None, "the last one to be let go of")
    await reaper.close()  # which would wait for one more
    assert began.read_text() == "xxx"
    assert [line.split(":")[0] for line in caplog.messages] == [
        "process reaper unavailable; orphaned child processes will not be killed"
    ]


@on_a_loop
async def test_stopped_reaper_is_killed_on_close(
    group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_TIMEOUT", 0.1)
    reaper = ProcessReaper()
    reaper.watch_group(group.pid)
    first = reaper._pid
    os.kill(first, signal.SIGSTOP)
    await reaper.close()
    assert not psutil.pid_exists(first)

"""The warden as its host has it: started when needed, replaced, and let go of."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import psutil
import pytest

from host.instances import process_reaper as module
from host.instances.process_reaper import Warden
from tests.conftest import DEADLINE, wait_until

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
    """Let the loop run until it holds."""
    await asyncio.to_thread(wait_until, condition, what)


def kill(pid: int) -> None:
    """Return when it is dead, and not yet reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@on_a_loop
async def test_a_group_is_ended_when_its_end_is_told(group: subprocess.Popen[bytes]) -> None:
    warden = Warden()
    warden.watch(group.pid)
    warden.end(group.pid)
    assert await asyncio.to_thread(group.wait, DEADLINE) == -signal.SIGTERM
    await until(lambda: group.pid not in warden._ended, "the end to be confirmed")
    await warden.close()


@on_a_loop
async def test_a_group_of_which_nothing_is_left_is_confirmed_at_once(lead: Lead) -> None:
    warden = Warden()
    process = lead("true")
    process.wait(DEADLINE)
    warden.watch(process.pid)
    warden.end(process.pid)
    await until(lambda: process.pid not in warden._ended, "the end to be confirmed")
    await warden.close()


@on_a_loop
async def test_without_a_stub_there_is_no_warden() -> None:
    before = set(psutil.Process().children())
    await Warden().close()
    assert not set(psutil.Process().children()) - before


@on_a_loop
async def test_groups_are_known_to_the_one_that_takes_its_place(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_SECONDS", DEADLINE)
    warden = Warden()
    groups = [lead(), lead()]
    warden.watch(groups[0].pid)
    first = warden._pid
    kill(first)
    warden.watch(groups[1].pid)
    assert warden._pid != first
    await warden.close()  # which both groups have not lived to see
    assert [process.wait(DEADLINE) for process in groups] == [-signal.SIGTERM] * 2


@on_a_loop
async def test_an_end_that_a_dying_one_did_not_hear_of_is_told_to_the_next(
    group: subprocess.Popen[bytes],
) -> None:
    warden = Warden()
    warden.watch(group.pid)
    first = warden._pid
    os.kill(first, signal.SIGSTOP)
    warden.end(group.pid)  # without an error: it is written to a socket that is open
    os.kill(first, signal.SIGKILL)
    assert await asyncio.to_thread(group.wait, DEADLINE) == -signal.SIGTERM
    await until(lambda: group.pid not in warden._ended, "the end to be confirmed")
    assert warden._pid != first
    await warden.close()


@on_a_loop
async def test_an_end_that_a_dying_one_did_not_hear_of_is_made_up_for_at_the_close(
    group: subprocess.Popen[bytes],
) -> None:
    warden = Warden()
    warden.watch(group.pid)
    os.kill(warden._pid, signal.SIGSTOP)
    warden.end(group.pid)
    os.kill(warden._pid, signal.SIGKILL)
    await warden.close()
    assert group.wait(DEADLINE) == -signal.SIGTERM


@on_a_loop
async def test_there_is_another_one_at_once_without_any_news(
    group: subprocess.Popen[bytes],
) -> None:
    warden = Warden()
    warden.watch(group.pid)
    first = warden._pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: warden._pid != first, "another one")
    await warden.close()
    assert group.wait(DEADLINE) == -signal.SIGTERM


@on_a_loop
async def test_those_that_die_at_once_are_not_replaced_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began = tmp_path / "began"
    entry = tmp_path / "process_reaper.py"
    entry.write_text(f"open({str(began)!r}, 'a').write('x')\nraise SystemExit(1)\n")
    monkeypatch.setattr(module, "_ENTRY", str(entry))
    warden = Warden()
    warden.watch(os.getpid())
    await until(lambda: began.exists() and began.read_text() == "xxx", "three of them")
    await until(lambda: warden._socket is None, "the last one to be let go of")
    await warden.close()  # which would wait for one more
    assert began.read_text() == "xxx"
    assert [line.split(":")[0] for line in caplog.messages] == [
        "nobody ends what models leave behind"
    ]


@on_a_loop
async def test_one_that_stands_still_holds_up_no_end(
    group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXIT_SECONDS", 0.1)
    warden = Warden()
    warden.watch(group.pid)
    first = warden._pid
    os.kill(first, signal.SIGSTOP)
    await warden.close()
    assert not psutil.pid_exists(first)

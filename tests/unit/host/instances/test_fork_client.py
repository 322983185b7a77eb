"""Stubs that another process starts: what it may tell, and launches that nobody waits for."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from host.environments.environment import Environment
from host.environments.sources import Sources
from host.instances.caller import CallerLauncher
from host.instances.fork_client import ForkClient
from host.instances.launchers import ForkLauncher
from host.instances.process import Launcher, StubProcess
from stub.wire.fork_protocol import receive_request, send_ended, send_started
from stub.wire.spawn import Spawn
from tests.conftest import DEADLINE
from tests.descriptors import descriptors

SPAWN = Spawn("ipc:///nowhere", "", "", 0, 0, 0, 0, 1, 0, 4096, 0, 4096)

GONE = "the process with the bound functions has ended"


class Lifelines:
    """Launches stubs; what they are given is closed if they do not take it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.codes: asyncio.Queue[int] = asyncio.Queue()

    async def launch(self, token: str = "t", environment: Environment | None = None) -> StubProcess:
        read, lifeline = os.pipe()
        os.close(read)
        try:
            return await self._launcher.launch(
                replace(SPAWN, token=token), lifeline, _unheard, self.codes.put_nowait, environment
            )
        except BaseException:  # a cancelled launch, too
            os.close(lifeline)  # so it was left open, as the contract of a launcher says
            raise


def _unheard(line: str, error: bool) -> None:
    pass


class Caller:
    """The other end of a `CallerLauncher`, which says what a test tells it to."""

    def __init__(self) -> None:
        self.heard_by, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.launcher = CallerLauncher(self.heard_by)
        self.stubs = Lifelines(self.launcher)

    async def asked(self) -> str:
        """The token of the next launch."""
        request = await asyncio.to_thread(receive_request, self.socket)
        assert request is not None
        spawn, stdout, stderr = request
        for descriptor in (*spawn.descriptors, stdout, stderr):
            os.close(descriptor)
        return spawn.token

    def started(self, token: str, number: int) -> None:
        pidfd = os.pidfd_open(os.getpid())
        send_started(self.socket, token, number, pidfd)
        os.close(pidfd)

    async def serves(self, number: int) -> None:
        """Check that a launch, and the end of its stub, go as they should."""
        launching = asyncio.create_task(self.stubs.launch(f"t{number}"))
        self.started(await self.asked(), number)
        stub = await launching
        assert stub.running
        send_ended(self.socket, number, 3)
        assert await self.stubs.codes.get() == 3
        assert not stub.running


def with_caller(test: Callable[[Caller], Awaitable[None]]) -> None:
    """Run a test in a loop, after which no descriptor may be open that was not before."""

    async def run() -> None:
        await asyncio.to_thread(int)  # what a loop opens on its way
        before = descriptors()
        caller = Caller()
        try:
            await asyncio.wait_for(test(caller), DEADLINE)
        finally:
            await caller.launcher.close()
            caller.socket.close()
        assert not descriptors() - before

    asyncio.run(run())


def test_a_stub_that_is_announced_without_its_descriptor_is_an_error_of_its_launch() -> None:
    async def test(caller: Caller) -> None:
        launching = asyncio.create_task(caller.stubs.launch())
        token = await caller.asked()
        caller.socket.send(b'{"token": "%s", "pid": 1}' % token.encode())
        with pytest.raises(OSError) as caught:
            await launching
        assert caught.value.errno == errno.EMFILE
        send_ended(caller.socket, 1, 0)
        await caller.serves(2)

    with_caller(test)


def test_news_of_stubs_that_nobody_has_asked_for_changes_nothing() -> None:
    async def test(caller: Caller) -> None:
        caller.started("of somebody else", 1)
        send_ended(caller.socket, 1, 0)
        send_ended(caller.socket, 7, 0)
        await caller.serves(2)

    with_caller(test)


def test_a_stub_whose_launch_was_cancelled_is_let_go_of() -> None:
    async def test(caller: Caller) -> None:
        launching = asyncio.create_task(caller.stubs.launch())
        token = await caller.asked()
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        caller.started(token, 1)
        send_ended(caller.socket, 1, 0)
        await caller.serves(2)

    with_caller(test)


def test_a_launch_that_is_cancelled_as_its_stub_is_announced_lets_go_of_it() -> None:
    async def test(caller: Caller) -> None:
        loop = asyncio.get_running_loop()
        launching = asyncio.create_task(caller.stubs.launch())
        caller.started(await caller.asked(), 1)

        def cancel_once_heard() -> None:
            if select.select([caller.heard_by], [], [], 0)[0]:
                loop.call_soon(cancel_once_heard)
            else:
                launching.cancel()

        cancel_once_heard()
        with pytest.raises(asyncio.CancelledError):
            await launching
        send_ended(caller.socket, 1, 0)
        await caller.serves(2)

    with_caller(test)


def test_the_end_of_the_other_process_is_the_end_of_launches_and_stubs() -> None:
    async def test(caller: Caller) -> None:
        launching = asyncio.create_task(caller.stubs.launch("first"))
        caller.started(await caller.asked(), 1)
        stub = await launching
        launching = asyncio.create_task(caller.stubs.launch("second"))
        assert await caller.asked() == "second"
        caller.socket.close()
        with pytest.raises(ConnectionError, match=GONE):
            await launching
        assert await caller.stubs.codes.get() == -signal.SIGKILL
        assert not stub.running
        with pytest.raises(ConnectionError, match=GONE):
            await caller.stubs.launch("third")

    with_caller(test)


def test_a_bound_function_has_no_environment(tmp_path: Path) -> None:
    async def test(caller: Caller) -> None:
        environment = Environment(tmp_path, Sources(tmp_path))
        with pytest.raises(OSError, match="a bound function runs in the process that has bound it"):
            await caller.stubs.launch(environment=environment)

    with_caller(test)


def test_a_launch_that_is_cancelled_leaves_nothing_of_a_fork_server_open() -> None:
    async def test() -> None:
        launcher = ForkLauncher()
        process = psutil.Process()
        stubs = Lifelines(launcher)

        async def start_and_end() -> None:
            stub = await stubs.launch()
            stub.kill()
            await stub.wait(DEADLINE)

        others = set(process.children())
        try:
            await start_and_end()
            before = descriptors()
            (server,) = set(process.children()) - others
            server.suspend()
            launching = asyncio.create_task(stubs.launch())
            await asyncio.sleep(0)
            assert descriptors() - before  # it has begun
            launching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await launching
            assert not descriptors() - before
            server.resume()
            await start_and_end()  # the other one has been heard of by then
            assert not descriptors() - before
        finally:
            await launcher.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE))


def test_launches_are_done_without_a_fork_server_that_stands_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        launcher = ForkLauncher(patience=8)
        process = psutil.Process()
        stubs = Lifelines(launcher)
        others = set(process.children())
        try:
            first = await stubs.launch("first")
            (server,) = set(process.children()) - others
            server.suspend()
            second = await stubs.launch("second")
            assert second.pid in {child.pid for child in process.children()}
            assert not server.is_running()
            third = await stubs.launch("third")
            assert third.pid not in {child.pid for child in process.children()}
            for stub in (first, second, third):
                stub.kill()
                assert await stub.wait(DEADLINE)
        finally:
            await launcher.close()

    with caplog.at_level("WARNING", "pbhost"):
        asyncio.run(asyncio.wait_for(test(), DEADLINE))
    silence = "the fork server has said nothing for 8 s"
    assert [record.message for record in caplog.records] == [
        f"{silence}: it is ended, and with it its stubs",
        f"{silence}: a stub is a new interpreter, in place of a fork",
    ]


def test_the_other_end_has_to_say_how_a_stub_has_ended() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lost = asyncio.Event()
        client = ForkClient(ours, GONE, lost.set, patience=0.1)
        launching = asyncio.create_task(client.start(SPAWN, 1, 2))
        await asyncio.sleep(0)
        pidfd = os.pidfd_open(os.getpid())
        send_started(theirs, SPAWN.token, 7, pidfd)  # in time, as nothing else has run since
        os.close(pidfd)
        started = await launching
        os.close(started.pidfd)
        client.expect_end(7)
        assert await started.code == -signal.SIGKILL
        assert lost.is_set() and client.closed
        theirs.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE))

"""Stubs that another process starts: the messages of that process, and launches without a waiting
caller.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from host.environments.environment import Environment, StubSources
from host.instances.fork_client import ForkClient
from host.instances.launchers import BoundProcessLauncher, ForkLauncher
from host.instances.ring_link import RingFiles
from host.instances.stub_process import Launcher, StubLaunch, StubProcess
from stub.wire.arena import file_size
from stub.wire.shared_file import create_shared_file
from stub.wire.spawn import (
    SpawnArguments,
    receive_event,
    receive_request,
    send_ended,
    send_refused,
    send_request,
    send_started,
)
from tests.conftest import DEADLINE, ROOT
from tests.descriptors import descriptors
from tests.waiting import FakeClockLoop

SPAWN = SpawnArguments("ipc:///nowhere", "", "", 0, 0, 0, 0, 0, 1, 0, 4096, 0, 4096)

GONE = "the process with the bound functions has ended"


class StubLauncher:
    """Launches stubs; what they are given is closed if they do not take it.

    The stubs end by themselves, unless it is entered: then they live until it is left.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.codes: asyncio.Queue[int] = asyncio.Queue()
        self._spawn = SPAWN
        self._opened: ExitStack | None = None

    def __enter__(self) -> StubLauncher:
        self._opened = ExitStack()
        rings = RingFiles("rings", 3)
        self._opened.callback(rings.close)
        arenas = [create_shared_file("arena", file_size(SPAWN.arena_limit)) for _ in range(2)]
        for arena in arenas:
            self._opened.callback(os.close, arena)
        self._spawn = replace(
            SPAWN,
            rings_fd=rings.memory,
            work_event_fd=rings.events[0],
            host_event_fd=rings.events[1],
            bls_event_fd=rings.events[2],
            arena_fd=arenas[0],
            host_arena_fd=arenas[1],
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()

    async def launch(self, token: str = "t", environment: Environment | None = None) -> StubProcess:
        read, lifeline = os.pipe()
        spawn = replace(self._spawn, token=token)
        if self._opened is None:
            os.close(read)
        else:
            self._opened.callback(os.close, read)
            spawn = replace(spawn, lifeline_fd=read)
        try:
            return await self._launcher.launch(
                StubLaunch(
                    spawn,
                    lifeline,
                    _ignore_output,
                    self.codes.put_nowait,
                    environment,
                )
            )
        except BaseException:  # a cancelled launch, too
            os.close(lifeline)  # so it was left open, as the contract of a launcher says
            raise


def _ignore_output(line: str, error: bool) -> None:
    pass


class FakeBoundProcess:
    """The other end of a `BoundProcessLauncher`, which says what a test tells it to."""

    def __init__(self) -> None:
        self.heard_by, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE)  # a loop does not end before its threads
        self.launcher = BoundProcessLauncher(self.heard_by)
        self.stubs = StubLauncher(self.launcher)

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
        """Checks that a launch, and the end of its stub, go as they should."""
        launching = asyncio.create_task(self.stubs.launch(f"t{number}"))
        self.started(await self.asked(), number)
        stub = await launching
        assert stub.running
        send_ended(self.socket, number, 3)
        assert await self.stubs.codes.get() == 3
        assert not stub.running


def with_bound_process(test: Callable[[FakeBoundProcess], Awaitable[None]]) -> None:
    """Runs a test in a loop, after which no descriptor may be open that was not before."""

    async def run() -> None:
        await asyncio.to_thread(int)  # what a loop opens on its way
        before = descriptors()
        process = FakeBoundProcess()
        try:
            await asyncio.wait_for(test(process), DEADLINE)
        finally:
            await process.launcher.close()
            process.socket.close()
        assert not descriptors() - before

    asyncio.run(run())


def test_a_stub_in_the_bound_process_leads_no_process_group() -> None:
    """Its process identifier is that of the caller, whose process group must not be killed."""

    async def test(process: FakeBoundProcess) -> None:
        launching = asyncio.create_task(process.stubs.launch())
        process.started(await process.asked(), 1)
        stub = await launching
        assert (stub.pid, stub.leads_process_group) == (os.getppid(), False)
        send_ended(process.socket, 1, 0)
        assert await process.stubs.codes.get() == 0

    with_bound_process(test)


def test_started_stub_without_a_pidfd_fails_its_launch() -> None:
    async def test(process: FakeBoundProcess) -> None:
        launching = asyncio.create_task(process.stubs.launch())
        token = await process.asked()
        process.socket.send(b'{"token": "%s", "pid": 1}' % token.encode())
        with pytest.raises(OSError) as caught:
            await launching
        assert caught.value.errno == errno.EMFILE
        send_ended(process.socket, 1, 0)
        await process.serves(2)

    with_bound_process(test)


def test_refused_launch_fails_with_the_reason() -> None:
    async def test(process: FakeBoundProcess) -> None:
        launching = asyncio.create_task(process.stubs.launch())
        send_refused(process.socket, await process.asked(), errno.EAGAIN)
        with pytest.raises(BlockingIOError) as caught:
            await launching
        assert caught.value.errno == errno.EAGAIN
        send_refused(process.socket, "of missing", errno.EAGAIN)
        await process.serves(2)

    with_bound_process(test)


def test_messages_about_unknown_stubs_are_ignored() -> None:
    async def test(process: FakeBoundProcess) -> None:
        process.started("of somebody else", 1)
        send_ended(process.socket, 1, 0)
        send_ended(process.socket, 7, 0)
        await process.serves(2)

    with_bound_process(test)


def test_stub_of_a_cancelled_launch_is_released() -> None:
    async def test(process: FakeBoundProcess) -> None:
        launching = asyncio.create_task(process.stubs.launch())
        token = await process.asked()
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        process.started(token, 1)
        send_ended(process.socket, 1, 0)
        await process.serves(2)

    with_bound_process(test)


def test_launch_cancelled_while_its_stub_starts_releases_it() -> None:
    async def test(process: FakeBoundProcess) -> None:
        loop = asyncio.get_running_loop()
        launching = asyncio.create_task(process.stubs.launch())
        process.started(await process.asked(), 1)

        def cancel_once_heard() -> None:
            if select.select([process.heard_by], [], [], 0)[0]:
                loop.call_soon(cancel_once_heard)
            else:
                launching.cancel()

        cancel_once_heard()
        with pytest.raises(asyncio.CancelledError):
            await launching
        send_ended(process.socket, 1, 0)
        await process.serves(2)

    with_bound_process(test)


def test_exit_of_the_other_process_fails_launches_and_ends_stubs() -> None:
    async def test(process: FakeBoundProcess) -> None:
        launching = asyncio.create_task(process.stubs.launch("first"))
        process.started(await process.asked(), 1)
        stub = await launching
        launching = asyncio.create_task(process.stubs.launch("second"))
        assert await process.asked() == "second"
        process.socket.close()
        with pytest.raises(ConnectionError, match=GONE):
            await launching
        assert await process.stubs.codes.get() == -signal.SIGKILL
        assert not stub.running
        with pytest.raises(ConnectionError, match=GONE):
            await process.stubs.launch("third")

    with_bound_process(test)


def test_a_bound_function_has_no_environment(tmp_path: Path) -> None:
    async def test(process: FakeBoundProcess) -> None:
        environment = Environment(tmp_path, StubSources(tmp_path))
        with pytest.raises(OSError, match="a bound function runs in the process that has bound it"):
            await process.stubs.launch(environment=environment)

    with_bound_process(test)


def test_cancelled_fork_server_launch_leaks_no_descriptor() -> None:
    async def test() -> None:
        launcher = ForkLauncher(silence_timeout=DEADLINE)
        process = psutil.Process()
        stubs = StubLauncher(launcher)

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


def test_fork_server_without_descriptors_refuses_a_launch_and_keeps_its_stubs() -> None:
    async def test() -> None:
        process = psutil.Process()
        others = set(process.children())
        try:
            first = await stubs.launch("first")
            (server,) = set(process.children()) - others
            limit = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (0, limit[1]))
            with pytest.raises(OSError) as caught:
                await stubs.launch("second")
            assert caught.value.errno == errno.EMFILE
            assert first.running
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limit)
            third = await stubs.launch("third")
            assert server.is_running()
            for stub in (first, third):
                stub.kill()
                assert await stub.wait(DEADLINE)
        finally:
            await launcher.close()

    launcher = ForkLauncher(silence_timeout=DEADLINE)
    with StubLauncher(launcher) as stubs:
        asyncio.run(asyncio.wait_for(test(), DEADLINE))


# The limit of processes does not hold for root, so the server becomes another user.
LIMITED_SERVER = """
import os, resource, sys
from stub.fork_server import run_fork_server
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
run_fork_server(int(sys.argv[1]))
"""


def test_fork_server_that_may_not_fork_refuses_launches_and_goes_on() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(DEADLINE)
        number = str(theirs.fileno())
        server = subprocess.Popen(
            [sys.executable, "-c", LIMITED_SERVER, number], pass_fds=[theirs.fileno()], cwd=ROOT
        )
        theirs.close()
        for token in ("first", "second"):
            send_request(ours, replace(SPAWN, token=token), 1, 2)
            event = receive_event(ours)
            assert event is not None
            assert event[0] == {"token": token, "error": errno.EAGAIN}
        ours.close()
        assert server.wait(DEADLINE) == 0


def test_stubs_of_a_fork_server_that_stands_still_go_on() -> None:
    loop = FakeClockLoop()

    async def test() -> None:
        process = psutil.Process()
        others = set(process.children())
        try:
            first = await stubs.launch("first")
            dying = await stubs.launch("dying")
            (server,) = set(process.children()) - others
            server.suspend()
            launching = asyncio.create_task(stubs.launch("second"))
            while not launching.done():
                await loop.advance(0.5)
            with pytest.raises(TimeoutError, match=r"the fork server did not answer for 2 s"):
                await launching
            third = await stubs.launch("third")
            (other,) = set(process.children()) - others - {server}
            assert psutil.Process(third.pid).ppid() == other.pid
            dying.kill()
            assert await dying.wait(DEADLINE)
            assert server.is_running()
            for stub in (first, third):
                stub.kill()
                assert await stub.wait(DEADLINE)
        finally:
            await launcher.close()
        assert not (server.is_running() or other.is_running())

    launcher = ForkLauncher(silence_timeout=2.0)
    with StubLauncher(launcher) as stubs:
        loop.run_until_complete(test())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGABRT])
def test_the_end_of_a_stub_is_known_while_the_fork_server_stands_still(
    signal_number: signal.Signals,
) -> None:
    async def test() -> None:
        process = psutil.Process()
        others = set(process.children())
        try:
            stub = await stubs.launch("first")
            (server,) = set(process.children()) - others
            server.suspend()
            os.kill(stub.pid, signal_number)
            assert await stubs.codes.get() == -signal_number
            server.resume()
        finally:
            await launcher.close()

    launcher = ForkLauncher(silence_timeout=DEADLINE)
    with StubLauncher(launcher) as stubs:
        asyncio.run(asyncio.wait_for(test(), DEADLINE))


def test_a_server_that_reaps_a_stub_and_says_nothing_does_not_hide_its_end() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lost = asyncio.Event()
        client = ForkClient(ours, GONE, lost.set, silence_timeout=0.1)
        launching = asyncio.create_task(client.start_stub(SPAWN, 1, 2))
        await asyncio.sleep(0)
        pidfd = os.pidfd_open(os.getpid())
        gone = 1 << 22  # no process has this number
        send_started(theirs, SPAWN.token, gone, pidfd)
        os.close(pidfd)
        started = await launching
        os.close(started.pidfd)
        client.expect_exit(gone)
        assert await started.code == -signal.SIGKILL
        assert client.silent and not client.closed and not lost.is_set()
        client.close()
        theirs.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE))

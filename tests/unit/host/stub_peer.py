"""A peer that speaks the stub's side of the wire from a thread, with the stub's own codec.

Each peer has a real process, so that the host can kill it and see its end.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from host.bls import BlsTargets
from host.crashes.records import CrashRecords
from host.environments.environment import Environment
from host.health import ServerState
from host.instances.pool import StubPool
from host.instances.stub_process import StubLaunch, StubProcess
from host.metrics.custom import CustomMetrics
from host.models.registry import Registry
from host.tracing.trace_settings import TraceConfig
from host.tracing.tracer import Tracer
from stub.stub_channel import Channel
from stub.wire import messages as m
from stub.wire.messages import WireResponse, WireTensor
from stub.wire.spawn import SpawnArguments
from tests.conftest import DEADLINE
from tests.waiting import eventually

ARENA_LIMIT = 1 << 26

SOURCE = m.ModelSource("/models/m", 1, "model.py")


def initialize_message(name: str = "m_0", decoupled: bool = False) -> m.Initialize:
    """The message that makes a stub an instance of the model `m`."""
    return m.Initialize(name, SOURCE, {"model_name": "m", "model_config": "{}"}, ["y"], decoupled)


Script = Callable[["StubPeer", m.ToStub], Sequence[m.ToHost]]
"""Returns the answers of a stub to a message of the host."""


def well_behaved(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
    """Becomes an instance and ends when told to. Leaves batches to the test."""
    if isinstance(message, m.AutoComplete):
        return [m.AutoCompleted(None)]
    if isinstance(message, m.Initialize):
        return [m.Initialized()]
    if isinstance(message, m.Finalize):
        return [m.Finalized(None)]
    return []


def echo(peer: StubPeer, message: m.ToStub) -> Sequence[m.ToHost]:
    """Answers each request with its own inputs, all of them as outputs `y`."""
    if not isinstance(message, m.Execute):
        return well_behaved(peer, message)
    answers: list[m.ToHost] = [
        m.Response(
            message.batch,
            index,
            WireResponse([WireTensor("y", t.code, t.shape, t.data) for t in request.inputs], {}),
        )
        for index, request in enumerate(message.requests)
    ]
    return [*answers, m.BatchDone(message.batch, 1, 2, 3, 4)]


class StubPeer:
    """One stub. `script` runs on its thread for each message that the host sends."""

    def __init__(self, spawn: SpawnArguments, process: subprocess.Popen[bytes], script: Script):
        # The host closes its descriptors when the process ends.
        self.spawn = replace(
            spawn,
            rings_fd=os.dup(spawn.rings_fd),
            work_event_fd=os.dup(spawn.work_event_fd),
            host_event_fd=os.dup(spawn.host_event_fd),
            bls_event_fd=os.dup(spawn.bls_event_fd),
        )
        self.process = process
        self.received: list[m.ToStub] = []
        copied = self.spawn
        self._copies = [copied.rings_fd, copied.work_event_fd, copied.host_event_fd]
        self._copies.append(copied.bls_event_fd)
        self._script = script
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._channel = channel = Channel(self.spawn)
        work = self.spawn.work_event_fd
        self._connected.set()
        while True:
            received, ready = channel.receive_service([work, channel.bls_event, self._stop], None)
            if self._stop in ready:
                break
            messages: list[m.ToStub] = []
            channel.read_bls_responses(messages.append)
            messages += received
            if work in ready:
                messages += channel.receive_work()
                while channel._inbox.announced:
                    messages += channel.receive_work()
            for message in messages:
                self.received.append(message)
                answers = self._script(self, message)
                if answers:
                    channel.send(answers)
                if any(isinstance(answer, (m.Finalized, m.LoadFailed)) for answer in answers):
                    self.exit()
        channel.mark_host_gone()
        channel.close()

    def send(self, *messages: m.ToHost) -> None:
        """Sends a frame from the test's thread."""
        assert self._connected.wait(DEADLINE)
        self._channel.send(messages)

    def send_raw(self, frame: bytes) -> None:
        """Sends bytes that need not be a frame."""
        assert self._connected.wait(DEADLINE)
        assert self._channel._ring.try_write(frame)
        os.eventfd_write(self.spawn.host_event_fd, 1)

    async def receives(self, kind: type[m.ToStub], count: int = 1) -> list[m.ToStub]:
        """Waits for `count` messages of a kind; returns all of the kind."""

        def found() -> list[m.ToStub]:
            return [message for message in self.received if isinstance(message, kind)]

        await eventually(lambda: len(found()) >= count, f"{count} {kind.__name__}")
        return found()

    def exit(self) -> None:
        """Ends the process with status 0."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        """Called when the process has ended."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        for descriptor in (*self._copies, self._stop):
            os.close(descriptor)


class _PeerProcess(StubProcess):
    leads_process_group = False


def _start_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


class PeerLauncher:
    """Starts peers. `script` is that of the peers that start from now on."""

    def __init__(self, script: Script = well_behaved) -> None:
        self.script = script
        self.peers: list[StubPeer] = []
        self.launched = asyncio.Event()
        self.refuses = 0  # the errno of launches that fail
        self.environments: list[Environment | None] = []

    async def launch(self, launched: StubLaunch) -> StubProcess:
        """As `Launcher.launch`."""
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        self.environments.append(launched.environment)
        process = _start_process()
        peer = StubPeer(launched.spawn, process, self.script)
        self.peers.append(peer)
        self.launched.set()
        pidfd = os.pidfd_open(process.pid)
        stub = _PeerProcess(process.pid, pidfd, launched)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(pidfd)
            code = process.wait()
            assert process.stdin is not None
            process.stdin.close()
            stub.mark_exited(code)
            peer.close()

        loop.add_reader(pidfd, ended)
        return stub

    async def close(self) -> None:
        """As `Launcher.close`."""


@asynccontextmanager
async def stub_pool(launcher: PeerLauncher) -> AsyncIterator[StubPool]:
    """A pool whose stubs are peers."""
    targets = BlsTargets(Registry(), ServerState(), Tracer(TraceConfig()))
    pool = StubPool(launcher, ARENA_LIMIT, targets, CustomMetrics(), False, CrashRecords(0))
    try:
        yield pool
    finally:
        await pool.close()

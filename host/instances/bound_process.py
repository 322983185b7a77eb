"""Instances in the process that started this host: bound functions."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from host.instances.fork_client import ForkClient
from host.instances.process import StubLaunch, StubProcess

_GONE = "the process with the bound functions has ended"


class _BoundThread(StubProcess):
    """A stub that is a thread of the caller's process. It cannot be killed, only abandoned."""

    leads_process_group = False

    def kill(self) -> None:
        """Closes its lifeline, so that it ends when its function returns; `on_exit` follows."""
        if self.running:
            asyncio.get_running_loop().call_soon(self.ended, -signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Called when it has ended or was abandoned; only the first time counts."""
        if self.running:
            super().mark_exited(code)


class BoundProcessLauncher:
    """Asks the caller for stubs over a socket, like a fork server.

    Source: docs/explanation/decisions/0016.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._client = ForkClient(sock, _GONE, lambda: None)

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """As `Launcher.launch`; the caller's Python is the only one."""
        if stub.environment is not None:
            raise OSError("a bound function runs in the process that has bound it")
        streams = sys.stdout.fileno(), sys.stderr.fileno()
        started = await self._client.start_stub(stub.spawn, *streams)
        thread = _BoundThread(os.getppid(), started.pidfd, stub)
        started.code.add_done_callback(lambda code: thread.ended(code.result()))
        return thread

    async def close(self) -> None:
        """As `Launcher.close`."""
        self._client.close()

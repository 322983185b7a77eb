"""The fork server, when its host goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from stub.wire.spawn import SpawnArguments, send_request
from tests.conftest import DEADLINE, ROOT

SPAWN = SpawnArguments("ipc:///nowhere", "", "", 0, 0, 0, 0, 0, 1, 0, 4096, 0, 4096)


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_a_fork_server_ends_in_silence_if_the_host_left_before_its_report(requests: int) -> None:
    host, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, ROOT / "stub" / "__main__.py", "--fork-server", str(own.fileno())],
        pass_fds=[own.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    own.close()
    os.kill(server.pid, signal.SIGSTOP)
    null = os.open(os.devnull, os.O_RDWR)
    for _ in range(requests):
        send_request(host, SPAWN, null, null)
    os.close(null)
    host.close()
    os.kill(server.pid, signal.SIGCONT)
    output, _ = server.communicate(timeout=DEADLINE)
    assert (server.returncode, output) == (0, "")

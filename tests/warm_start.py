"""Hosts as forks of a process that has imported `pbhost serve` already.

The imports are three quarters of the CPU time of a start, which many hundred tests pay for. A fork
has the arguments, the folder, the environment and the output of a host that is started by its
command line; from there on, it runs the same code.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST_REQUEST = 1 << 20
_READ_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OPENBLAS_", "OMP_", "GRPC_")
"""How variables begin that count only while an interpreter starts or a library is imported."""


class ForkedHost:
    """The process of a host, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, starter: HostStarter, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._starter = starter

    def poll(self) -> int | None:
        """The exit status, or minus the signal, if it has ended."""
        if self.returncode is None:
            self.returncode = self._starter.take_status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status once it has ended."""
        end = time.monotonic() + (timeout or float("inf"))
        pause = threading.Event()
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("pbhost serve", timeout or 0.0)
            pause.wait(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ends it as a service manager does."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


class HostStarter:
    """The process that forks hosts; it starts with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, arguments: Sequence[str], env: Mapping[str, str], output: int) -> ForkedHost:
        """Forks a host, which writes to the descriptor `output`."""
        if self._process is None:
            self._launch()
        request = {"arguments": list(arguments), "directory": os.getcwd(), "environment": dict(env)}
        return ForkedHost(self, self._ask(request, output))

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether a fork behaves as a new interpreter does in this environment."""
        changed = {name for name, _ in env.items() ^ self._environment.items()}
        return not any(name.startswith(_READ_AT_START) for name in changed)

    def take_status(self, pid: int) -> int | None:
        """The exit status of a host if it has ended, which is told once."""
        status: int | None = self._ask({"pid": pid})
        return status

    def close(self) -> None:
        """Ends the process; hosts that run go on."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.wait()

    def _launch(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", str(its.fileno())],
                env=self._environment,
                cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )

    def _ask(self, request: Mapping[str, object], *descriptors: int) -> Any:
        assert self._socket is not None
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(_LARGEST_REQUEST)
        assert answer, "the process that forks hosts has ended"
        return json.loads(answer)


def _fork_for_requests(requests: socket.socket) -> dict[str, Any]:
    """Answers requests; returns one in each fork, which is to serve it."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 1)
        if not data:
            sys.exit()
        request: dict[str, Any] = json.loads(data)
        if "pid" in request:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            (output,) = descriptors
            answer = os.fork()
            if answer == 0:
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                requests.close()
                return request
            os.close(output)
        requests.send(json.dumps(answer).encode())


def main() -> None:
    """Imports what a host needs, and forks one for each request."""
    del sys.path[0]  # as `python -m pbhost` does
    command = importlib.import_module("pbhost.host.__main__")
    importlib.import_module("pbhost.host.cli.serve")
    request = _fork_for_requests(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = ["serve", *request["arguments"]]
    command.main()


if __name__ == "__main__":
    main()

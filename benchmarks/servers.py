"""The two servers that are compared: started on the same models, watched, stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import tritonclient.grpc as grpcclient

from benchmarks.peer import Peer

DEADLINE = 180.0  # seconds for a server to become ready


class RunningServer:
    """A server that is ready; `seconds` is how long that took from its start."""

    def __init__(self, pid: int, grpc_port: int, http_port: int, seconds: float) -> None:
        self.pid = pid
        self.grpc_port = grpc_port
        self.http_port = http_port
        self.seconds = seconds

    def stub_megabytes(self) -> list[float]:
        """Proportional set size of each stub: its share of all memory it has mapped."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [child.memory_full_info().pss / 1e6 for child in children]


@contextmanager
def ours(repository: Path, engine: str = "h2") -> Iterator[RunningServer]:
    """This project's host, with that engine behind its gRPC port."""
    port, http_port = _free_port(), _free_port()
    command = [sys.executable, "-m", "host", "serve", f"--model-repository={repository}"]
    command += [f"--grpc-port={port}", "--grpc-address=127.0.0.1", "--allow-metrics=false"]
    command += [f"--http-port={http_port}", "--http-address=127.0.0.1"]
    command += ["--allow-client-shm=true", f"--grpc-engine={engine}"]
    with _running(command, port, http_port) as server:
        yield server


@contextmanager
def theirs(repository: Path, peer: Peer) -> Iterator[RunningServer]:
    """The peer."""
    port, http_port = _free_port(), _free_port()
    command = peer.command(repository, port, http_port)
    with _running(command, port, http_port, peer.environment()) as server:
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(
    command: Sequence[str],
    port: int,
    http_port: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    # Not in this folder: the peer's stubs would import our triton_python_backend_utils from it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**(environment or os.environ)}, cwd=folder
        )
        try:
            _wait_ready(process, port)
            yield RunningServer(process.pid, port, http_port, time.monotonic() - started)
        except BaseException:  # Ctrl-C, too: what the server printed tells why; raised again
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            process.wait(60)


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    pause = threading.Event()
    end = time.monotonic() + DEADLINE
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise SystemExit(f"{process.args} has ended")
            # Asked over a bare socket first: a failed gRPC connection backs off for a second.
            with socket.socket() as probe:
                listening = probe.connect_ex(("127.0.0.1", port)) == 0
            if listening and client.is_server_ready():
                return
            pause.wait(0.005)
    raise SystemExit(f"{process.args} was not ready in {DEADLINE} s")

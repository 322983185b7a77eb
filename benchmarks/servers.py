"""Starts and stops the two servers that are compared, with the same models."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import tritonclient.grpc as grpcclient

from benchmarks.peer import CACHE, Peer

DEADLINE = 180.0  # timeout in seconds for a server to become ready


class RunningServer:
    """A running server that is ready; `seconds` is its start-up time."""

    def __init__(self, pid: int, grpc_port: int, http_port: int, seconds: float) -> None:
        self.pid = pid
        self.grpc_port = grpc_port
        self.http_port = http_port
        self.seconds = seconds

    def stub_megabytes(self) -> list[float]:
        """Proportional set size (PSS) of each stub in MB: its share of all memory it has mapped."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [child.memory_full_info().pss / 1e6 for child in children]

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the server's process, and that of its stubs with it."""
        process = psutil.Process(self.pid)
        own, *children = (
            times.user + times.system
            for times in (each.cpu_times() for each in (process, *process.children(recursive=True)))
        )
        return own, own + sum(children)


@contextmanager
def ours(
    repository: Path, engine: str = "h2", flags: Sequence[str] = ()
) -> Iterator[RunningServer]:
    """Runs this project's host with a gRPC engine, and other flags."""
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "pbhost", "serve", f"--model-repository={repository}"]
    command += [f"--grpc-port={port}", "--grpc-address=127.0.0.1", "--allow-metrics=false"]
    command += [f"--http-port={http_port}", "--http-address=127.0.0.1"]
    command += ["--allow-client-shm=true", f"--grpc-engine={engine}"]
    command += [f"--cache-config={CACHE}"]
    command += flags
    with running(command, port, http_port, _is_ready(port, http_port)) as server:
        yield server


@contextmanager
def theirs(repository: Path, peer: Peer, flags: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Runs the peer, with other flags."""
    port, http_port = free_port(), free_port()
    command = [*peer.command(repository, port, http_port), *flags]
    with running(
        command, port, http_port, _is_ready(port, http_port), peer.environment()
    ) as server:
        yield server


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    http_port: int,
    is_ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Runs a server and yields it when it is ready. On a failure, prints the server's output.

    Raises SystemExit if it ends early or is not ready in time.
    """
    # Not this folder: the peer's stubs would import our triton_python_backend_utils from it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**(environment or os.environ)}, cwd=folder
        )
        try:
            _wait_ready(process, is_ready)
            yield RunningServer(process.pid, port, http_port, time.monotonic() - started)
        except BaseException:  # also Ctrl-C: print the server's output, then raise it again
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-4000:])
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stops the server, and kills processes of it that are left."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=5)
    for child in left:
        child.kill()


def _wait_ready(process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> None:
    pause = threading.Event()
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} has ended")
        if is_ready():
            return
        pause.wait(0.005)
    raise SystemExit(f"{process.args!r} was not ready in {DEADLINE} s")


def _is_ready(port: int, http_port: int) -> Callable[[], bool]:
    def is_ready() -> bool:
        # Try plain sockets first: a failed gRPC connection waits a second before it tries again.
        for one in (port, http_port):  # Triton opens the port for HTTP last
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", one)):
                    return False
        with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
            return bool(client.is_server_ready())

    return is_ready

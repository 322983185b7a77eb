"""A server of its own for a model that is tuned: a process with private ports."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from host.cli.model_client import ModelClient
from host.cli.server_client import ConnectionOptions, ServerClient
from host.errors import unavailable
from host.load_generator.workers import reap_process
from host.metrics.overview import ServerOverview

_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with the command
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
sys.path[0] = sys.argv.pop(1)
from host.__main__ import main
main()
"""
_START_SECONDS, _LOAD_SECONDS, _STOP_SECONDS = 60.0, 120.0, 20.0
_PORT = re.compile(rb"Started (GRPCInferenceService|HTTPService) at [\d.]+:(\d+)")


class PrivateServer:
    """Serves the repository of one model. Other models are loaded when this one calls them."""

    def __init__(self, model: Path, backend_directory: str) -> None:
        """Raises HostError if the server does not start."""
        self._log = tempfile.TemporaryFile()
        flags = [
            f"--model-repository={model.parent}",
            "--model-control-mode=on-demand",
            "--grpc-address=127.0.0.1",
            "--http-address=127.0.0.1",
            "--grpc-port=0",
            "--http-port=0",
            "--allow-metrics=false",
            f"--backend-directory={backend_directory}",
        ]
        self._name = model.name
        self._pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), _ROOT, "serve", *flags],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, self._log.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, self._log.fileno(), 2),
            ],
            setpgroup=0,  # Ctrl-C is for the command
        )
        try:
            ports = self._wait_for_ports()
        except BaseException:  # also if interrupted, as nothing else owns the process yet
            self.close()
            raise
        self.url = f"grpc://127.0.0.1:{ports['GRPCInferenceService']}"
        none = ConnectionOptions()
        self._http = ServerClient(f"http://127.0.0.1:{ports['HTTPService']}", none, _LOAD_SECONDS)
        self.client = ModelClient(self.url, none, _LOAD_SECONDS)

    def _wait_for_ports(self) -> dict[str, int]:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            log = self._read_log()
            ports = {name.decode(): int(port) for name, port in _PORT.findall(log)}
            if len(ports) == 2:
                return ports
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                self._pid = 0
                lines = log.decode(errors="replace").strip().split("\n")
                raise unavailable(f"the server of the model did not start: {lines[-1]}")
            time.sleep(0.02)
        raise unavailable(f"the server of the model did not start in {_START_SECONDS:.0f} s")

    def _read_log(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0)

    def load(self, config: Mapping[str, Any] | None = None) -> None:
        """Loads the model, with another configuration than in its file. Raises HostError."""
        parameters = {} if config is None else {"config": json.dumps(config)}
        body = json.dumps({"parameters": parameters}).encode()
        self._http.post(f"/v2/repository/models/{quote(self._name, safe='')}/load", body, {})

    def read_config(self) -> dict[str, Any]:
        """Returns the complete configuration of the model. Raises HostError."""
        return self._http.read(f"/v2/models/{quote(self._name, safe='')}/config", dict[str, Any])

    def read_cpu_time(self) -> int:
        """Returns the CPU time of the server process in nanoseconds. Raises HostError."""
        return int(1e9 * self._http.read("/v2/overview", ServerOverview).cpu_seconds)

    def close(self) -> None:
        """Stops the server."""
        pid, self._pid = self._pid, 0
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            reap_process(pid, _STOP_SECONDS)
        self._log.close()

    def __enter__(self) -> PrivateServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.close()

"""Containers run by runc as restricted pods are: read-only, without rights, little /dev/shm."""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE, wait_until
from tests.image.images import run_program

LOOPBACK = [f"--{port}-address=127.0.0.1" for port in ("http", "grpc", "metrics")]
"""Flags for containers, which share the network of the machine here."""
FREE_PORTS = [f"--{port}-port=0" for port in ("http", "grpc", "metrics")]


class Container:
    """A container that runs. `folder`: for its bundle, its state and its output."""

    def __init__(self, folder: Path, bundle: dict[str, Any]) -> None:
        self.name = f"pbhost-test-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(bundle))
        self._runc = ["runc", f"--root={folder}/state"]
        self._output = folder / "output"
        command = [*self._runc, "run", f"--bundle={folder}", self.name]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        """What it has printed by now."""
        return self._output.read_text()

    @property
    def is_running(self) -> bool:
        """Whether its process 1 runs."""
        return self._process.poll() is None

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits for a match of the pattern in its output."""
        found: list[re.Match[str]] = []

        def printed() -> bool:
            found.extend(re.finditer(pattern, self.output))
            return bool(found) or not self.is_running

        wait_until(printed, f"{pattern!r} in the output", state=lambda: self.output)
        assert found, f"the container has ended:\n{self.output}"
        return found[0]

    def client(self) -> grpcclient.InferenceServerClient:
        """A new client; use it as a context manager."""
        port = self.wait_for(r"Started GRPCInferenceService at \S+:(\d+)").group(1)
        return grpcclient.InferenceServerClient(f"127.0.0.1:{port}")

    def init_process(self) -> psutil.Process:
        """Its process 1."""
        state = json.loads(run_program(*self._runc, "state", self.name))
        return psutil.Process(state["pid"])

    def stop(self) -> int:
        """Stops it as an orchestrator does; returns its exit status."""
        if self.is_running:
            run_program(*self._runc, "kill", self.name, "TERM")
        return self._process.wait(DEADLINE)

    def kill(self) -> None:
        """Ends it at once, if it runs."""
        if self.is_running:
            run_program(*self._runc, "kill", self.name, "KILL")
            self._process.wait(DEADLINE)


@contextmanager
def running(
    folder: Path,
    root: Path,
    image: Any,
    arguments: Sequence[str],
    models: Path,
    memory: int | None = None,
) -> Iterator[Container]:
    """A container with the configuration of an image, and other arguments.

    `memory`: the limit in bytes; the root file system is read-only, /dev/shm has 64 KiB.
    """
    user, group = (int(number) for number in image["User"].split(":"))
    process = {
        "user": {"uid": user, "gid": group},
        "args": [*arguments, *LOOPBACK, *FREE_PORTS],
        "env": image["Env"],
        "cwd": image["WorkingDir"],
        "noNewPrivileges": True,
        "capabilities": {},
    }
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        _memory_mount("/dev", "mode=755", "size=64k"),
        _memory_mount("/dev/shm", "mode=1777", "size=64k"),
        _memory_mount("/tmp", "mode=1777", "size=16m"),
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
        {
            "destination": "/models",
            "type": "bind",
            "source": str(models),
            "options": ["rbind", "ro"],
        },
    ]
    bundle = {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "process": process,
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": name} for name in ("pid", "mount", "ipc")],
            "resources": {"memory": {"limit": memory, "swap": memory}} if memory else {},
        },
    }
    container = Container(folder, bundle)
    try:
        yield container
    finally:
        container.kill()


def _memory_mount(place: str, *options: str) -> dict[str, Any]:
    return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": [*options]}

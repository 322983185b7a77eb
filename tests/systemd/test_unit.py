"""The unit of deploy/systemd under a real systemd, which boots in a container of its own.

The container's root is that of this machine, with all changes in memory. Run it as root with
`make test-systemd`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import DEADLINE, ROOT, wait_until

pytestmark = pytest.mark.skipif(
    "PBHOST_TEST_SYSTEMD" not in os.environ, reason="make test-systemd runs this"
)

UNIT = ROOT / "deploy" / "systemd" / "pbhost.service"
SETTINGS = """
model-repository = ["/srv/models"]
log-file = "/var/log/pbhost/pbhost.log"
"""
LIBRARIES = "LD_LIBRARY_PATH=/opt/python/lib"
"""Where the Python of the tests finds its own library, if it has one."""
ASK = """
import json
from urllib.request import urlopen

tensors = [
    {"name": name, "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    for name in ("INPUT0", "INPUT1")
]
body = json.dumps({"inputs": tensors}).encode()
with urlopen("http://localhost:8000/v2/models/add_sub/infer", body) as answer:
    print(json.load(answer)["outputs"][0]["data"])
"""


class Machine:
    """A container in which systemd is process 1; `leader`: its id outside."""

    def __init__(self, leader: int) -> None:
        self._enter = [
            "nsenter",
            f"--target={leader}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
        ]

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [*self._enter, *command], capture_output=True, text=True, timeout=DEADLINE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def unit(self, name: str) -> str:
        """A property of the unit."""
        return self.run("systemctl", "show", "pbhost", "--value", f"--property={name}")

    def processes(self) -> set[int]:
        """The processes of the unit, by their ids inside."""
        folder = "/sys/fs/cgroup/systemd" if Path("/sys/fs/cgroup/systemd").exists() else ""
        group = self.unit("ControlGroup")
        if not group:
            return set()
        path = f"{folder or '/sys/fs/cgroup'}{group}/cgroup.procs"
        return {int(line) for line in self.run("cat", path).split()}


def write_program(folder: Path) -> dict[Path, str]:
    """Writes what is in /opt/pbhost; returns the folders to bind, and where."""
    python = Path(sys.executable).resolve().name
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (site / "pbhost.pth").write_text("/opt/source\n/opt/packages\n")
    (folder / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(f"/opt/python/bin/{python}")
    program = folder / "bin" / "pbhost"
    program.write_text("#!/opt/pbhost/bin/python3\nfrom host.__main__ import main\n\nmain()\n")
    program.chmod(0o755)
    return {
        folder: "/opt/pbhost",
        Path(sys.base_prefix): "/opt/python",
        Path(sysconfig.get_path("purelib")): "/opt/packages",
        ROOT: "/opt/source",
        ROOT / "model_repository" / "add_sub": "/srv/models/add_sub",
        UNIT: "/etc/systemd/system/pbhost.service",
    }


@contextmanager
def mounted(target: Path, *arguments: str) -> Iterator[Path]:
    target.mkdir()
    subprocess.run(["mount", *arguments, str(target)], check=True, timeout=DEADLINE)
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True, timeout=DEADLINE)


def find_leader(container: subprocess.Popen[bytes]) -> int:
    """The first process of a container, once it takes commands; 0 before."""
    for process in psutil.Process(container.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            root = Path(f"/proc/{process.pid}/root")
            if process.name() == "systemd" and (root / "run/systemd/private").exists():
                return process.pid
    return 0


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if os.geteuid() or shutil.which("systemd-nspawn") is None:
        pytest.skip("needs root and systemd-nspawn (Debian: apt-get install systemd-container)")
    (tmp_path / "program").mkdir()
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "pbhost.toml").write_text(SETTINGS)
    (settings / "environment").write_text(f"{LIBRARIES}\n")
    places = {**write_program(tmp_path / "program"), settings: "/etc/pbhost"}
    with ExitStack() as stack:
        changes = stack.enter_context(mounted(tmp_path / "changes", "-t", "tmpfs", "tmpfs"))
        (changes / "upper").mkdir()
        (changes / "work").mkdir()
        layers = f"lowerdir=/,upperdir={changes}/upper,workdir={changes}/work"
        root = stack.enter_context(
            mounted(tmp_path / "root", "-t", "overlay", "overlay", "-o", layers)
        )
        log = stack.enter_context((tmp_path / "boot.log").open("wb"))
        container = subprocess.Popen(
            ["systemd-nspawn", "--quiet", f"--directory={root}", "--boot", "--private-network",
             "--register=no", "--keep-unit", "--machine=pbhost-test", "--console=pipe",
             *(f"--bind-ro={source}:{target}" for source, target in places.items()),
             "systemd.unit=pbhost.service"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            wait_until(
                lambda: bool(find_leader(container)) or container.poll() is not None, "systemd"
            )
            assert container.poll() is None, (tmp_path / "boot.log").read_text()
            yield Machine(find_leader(container))
        finally:
            container.send_signal(signal.SIGTERM)
            container.wait(DEADLINE)


def test_the_unit_serves_reloads_restarts_and_stops(machine: Machine) -> None:
    wait_until(
        lambda: machine.unit("ActiveState") == "active",
        "the start",
        state=lambda: machine.run("journalctl", "--no-pager", "--lines=40"),
    )
    assert machine.unit("StatusText") == "Serving"
    ask = ("env", LIBRARIES, "/opt/pbhost/bin/python3", "-c", ASK)
    assert json.loads(machine.run(*ask)) == [2, 4, 6, 8]

    log = "/var/log/pbhost/pbhost.log"
    machine.run("mv", log, f"{log}.1")
    machine.run("systemctl", "reload", "pbhost")
    wait_until(lambda: "pbhost.log\n" in machine.run("ls", "/var/log/pbhost/") + "\n", "a new log")

    before = machine.processes()
    main = machine.unit("MainPID")
    assert int(main) in before and len(before) > 2
    machine.run("kill", "-KILL", main)
    wait_until(lambda: machine.unit("NRestarts") == "1", "the restart")
    wait_until(lambda: machine.unit("ActiveState") == "active", "the second start")
    assert not before & machine.processes()
    assert json.loads(machine.run(*ask)) == [2, 4, 6, 8]

    machine.run("systemctl", "stop", "pbhost")
    assert (machine.unit("ActiveState"), machine.unit("Result")) == ("inactive", "success")
    assert machine.processes() == set()
